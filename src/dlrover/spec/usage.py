"""What a node uses of its machine."""

from __future__ import annotations

import msgspec


class NodeUsage(msgspec.Struct, frozen=True):
    """One look at a node."""

    cpu: float
    """Cores that its workers keep busy, with their children, since the last look."""
    memory: int
    """Bytes in use that cannot be given back: of its container, or of the machine where there is none."""
    limit: int
    """Bytes that there are; 0 if that is not known."""
