"""What the launcher of this process says about training. Nothing, unless it says so."""

from __future__ import annotations

auto_tuning = False
"""Whether loaders and trainers that are not told tune themselves: ``--auto-tunning``."""
global_batch = 0
"""Samples of a step of all workers that were chosen for the job; 0: as many as the program says."""
