"""What a node uses of its machine."""

from __future__ import annotations

import msgspec


class NodeUsage(msgspec.Struct, frozen=True):
    """One look at a node."""

    cpu: float
    """Cores kept busy since the last look: by everything in its control group or container, or by its workers
    with their children where it shares them."""
    memory: int
    """Bytes in use that cannot be given back: of its control group or container, or of the machine where there
    is none."""
    limit: int
    """Bytes that there are; 0 if that is not known."""
    cores: float = 0.0
    """Cores that it may keep busy; 0 if that is not known."""
    busy: float = -1.0
    """Share of time in which its accelerators work, their mean, 0 to 1; -1 if there are none or none tells."""
