"""Roles of a job's nodes, derived from their wanted ranks.

Workers have wanted ranks from 0, servers (role ``ps``, parameter servers) those from `FIRST_SERVER`, so that
a world lists its workers first.
"""

from __future__ import annotations

from typing import NamedTuple

WORKER = "worker"
SERVER = "ps"
FIRST_SERVER = 1 << 20
"""Wanted rank of the first server; the wanted ranks of all workers are lower."""


def is_server(node_rank: int) -> bool:
    """Return whether a node with this wanted rank is a server."""
    return node_rank >= FIRST_SERVER


def role_of(node_rank: int) -> str:
    """Return the role of a node with this wanted rank: `WORKER` or `SERVER`."""
    return SERVER if is_server(node_rank) else WORKER


def index_in_role(node_rank: int) -> int:
    """Return a node's index among the wanted nodes of its role, from 0."""
    return node_rank - FIRST_SERVER if is_server(node_rank) else node_rank


class Size(NamedTuple):
    """Number of nodes by role, of an actual or a possible world."""

    workers: int
    """Nodes that are not servers."""
    servers: int = 0

    @property
    def nodes(self) -> int:
        """Total number of nodes."""
        return self.workers + self.servers

    def sentence_part(self) -> str:
        """Return ``2 workers and 1 server``."""
        return f"{_count(self.workers, 'worker')} and {_count(self.servers, 'server')}"

    def change_to(self, size: Size) -> str:
        """Return ``1 -> 2 nodes``; with servers, the changes of both roles."""
        if not size.servers:
            return f"{self.workers} -> {size.workers} nodes"
        pairs = zip(("workers", "servers"), self, size, strict=True)
        return ", ".join(f"{old} -> {new} {role}" for role, old, new in pairs if old != new)


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"
