"""What the launcher of this process wants of checkpoints, where the program does not say."""

from __future__ import annotations

save_at_breakpoint = False
"""Whether the newest step in memory is stored when a worker dies (``dlrover-run --save-at-breakpoint``)."""
node = ""
"""Which of the nodes on this machine the process is on: each has a saver; empty: the machine is one node."""
