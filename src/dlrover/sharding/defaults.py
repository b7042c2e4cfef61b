"""Access to the dealer, as the launcher of this process set it; empty unless it did."""

from __future__ import annotations

from collections.abc import Callable

relay = ""
"""Abstract Unix socket, without the NUL, on which the node's agent takes requests for the master."""
round = 0  # noqa: A001 - its name everywhere
"""Round of this worker process."""
reading: Callable[[int, int, int], None] | None = None
"""Callback with the dataset's key, the lane and the first position of each shard whose reading begins."""
