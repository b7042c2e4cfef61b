"""The roles of a job's nodes, as their wanted ranks tell them.

Workers have the wanted ranks from 0, servers (role ``ps``, parameter servers) those from `FIRST_SERVER`, so that
a world has its workers first.
"""

from __future__ import annotations

from typing import NamedTuple

WORKER = "worker"
SERVER = "ps"
FIRST_SERVER = 1 << 20
"""The wanted rank of the first server; that of every worker is below it."""


def is_server(node_rank: int) -> bool:
    """Whether a node with this wanted rank is a server."""
    return node_rank >= FIRST_SERVER


def role_of(node_rank: int) -> str:
    """The role of a node with this wanted rank: `WORKER` or `SERVER`."""
    return SERVER if is_server(node_rank) else WORKER


def index_in_role(node_rank: int) -> int:
    """The place of a node among the wanted nodes of its role, from 0."""
    return node_rank - FIRST_SERVER if is_server(node_rank) else node_rank


class Size(NamedTuple):
    """Nodes by role: of a world, or of what a world could be made of."""

    workers: int
    """Nodes that are no servers."""
    servers: int = 0

    @property
    def nodes(self) -> int:
        """All of them."""
        return self.workers + self.servers

    def sentence_part(self) -> str:
        """``2 workers and 1 server``."""
        return f"{_count(self.workers, 'worker')} and {_count(self.servers, 'server')}"


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"
