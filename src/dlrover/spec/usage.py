"""Resource usage of a node."""

from __future__ import annotations

import msgspec


class NodeUsage(msgspec.Struct, frozen=True):
    """One measurement of a node."""

    cpu: float
    """Cores kept busy since the last measurement by the control group or container of the node, or by the
    node's workers and their children if it shares that group."""
    memory: int
    """Bytes in use that cannot be reclaimed: of the node's control group or container, or of the machine if
    there is none."""
    limit: int
    """Available bytes; 0 if unknown."""
    cores: float = 0.0
    """Cores that the node may keep busy; 0 if unknown."""
    busy: float = -1.0
    """Mean share of time in which its accelerators work, 0 to 1; -1 if there are none or none reports it."""
