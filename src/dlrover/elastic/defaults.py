"""Training defaults set by the launcher of this process; neutral otherwise."""

from __future__ import annotations

auto_tuning = False
"""True if loaders and trainers tune themselves by default: ``--auto-tunning``."""
global_batch = 0
"""Global batch chosen for the job, in samples; 0: the program's own."""
