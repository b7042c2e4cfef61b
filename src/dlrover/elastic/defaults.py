"""What the launcher of this process says about training. Nothing, unless it says so."""

from __future__ import annotations

auto_tuning = False
"""Whether loaders and trainers that are not told tune themselves: ``--auto-tunning``."""
