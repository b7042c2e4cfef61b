"""``dlrover nodes``: the resources that each node of a job uses and has."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from dlrover.rpc.messages import NodeState
from dlrover.spec.events import size


def render(nodes: Sequence[NodeState], console: Console) -> None:
    """Print a job's nodes as a table."""
    table = Table("node", "rank", "status", "host", "memory", "cores", "accelerators", box=None)
    for node in nodes:
        table.add_row(
            str(node.id),
            str(node.node_rank) if node.node_rank >= 0 else "-",
            node.status,
            node.hostname or "-",
            _of(size(node.memory), size(node.memory_limit)) if node.memory_limit else "-",
            _of(f"{node.cpu:.2f}", f"{node.cores:g}") if node.cores else "-",
            f"{node.busy:.0%} busy" if node.busy >= 0 else "-",
        )
    console.print(table)


def _of(used: str, limit: str) -> str:
    return f"{used} of {limit}"
