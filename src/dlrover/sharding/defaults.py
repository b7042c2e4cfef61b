"""What the launcher of this process says about who deals the data. Nothing, unless it says so."""

from __future__ import annotations

from collections.abc import Callable

relay = ""
"""Where the node's agent takes requests for the master: an abstract Unix socket, without the NUL."""
round = 0  # noqa: A001 - its name everywhere
"""The round that this process is a worker of."""
reading: Callable[[int, int, int], None] | None = None
"""Is told the key of the data set, lane and first position of each shard whose samples are read now."""
