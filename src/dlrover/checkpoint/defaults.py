"""Checkpoint settings from the launcher of this process, used where the program sets none."""

from __future__ import annotations

save_at_breakpoint = False
"""True to store the newest step in memory when a worker dies (``dlrover-run --save-at-breakpoint``)."""
node = ""
"""The process's node, if a machine hosts several, each with a saver; empty: the machine is one node."""
