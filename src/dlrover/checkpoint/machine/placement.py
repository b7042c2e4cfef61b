"""Placement of copies of a node's memory on other nodes, as in GEMINI (SOSP 2023).

A step is lost only when all nodes of one group are lost; in a ring every run of neighbours is a group.
"""

from __future__ import annotations


def holders(node: int, nodes: int, copies: int) -> tuple[int, ...]:
    """Return the other nodes that hold copies of a node's memory.

    Args:
        node: the node's number, from 0.
        nodes: the number of nodes.
        copies: the number of copies of each node's memory, including its own.

    Nodes are grouped by number, ``copies`` to a group; if some are left over, they form a ring with the
    last group.
    """
    copies = max(1, min(copies, nodes))
    grouped = (nodes // copies - 1) * copies  # a ring of ``copies`` nodes is a group, too
    if node < grouped:
        first = node - node % copies
        return tuple(other for other in range(first, first + copies) if other != node)
    return tuple(grouped + n for n in ring(node - grouped, nodes - grouped, copies))


def ring(node: int, nodes: int, copies: int) -> tuple[int, ...]:
    """Return the holders in a ring, where each node's memory is copied to the nodes that follow it."""
    return tuple((node + distance) % nodes for distance in range(1, copies))
