"""Which nodes hold copies of a node's memory: the placement of GEMINI (SOSP 2023).

Groups lose a step only when all nodes of one group are lost; with rings every run of neighbours is one.
"""

from __future__ import annotations


def holders(node: int, nodes: int, copies: int) -> tuple[int, ...]:
    """The other nodes that hold copies of a node's memory.

    Args:
        node: its number, from 0.
        nodes: how many there are.
        copies: how many there are to be of each node's memory, with its own.

    Nodes are grouped by number, ``copies`` of them each; where that leaves a rest, the last group and the
    rest are a ring.
    """
    copies = max(1, min(copies, nodes))
    grouped = (nodes // copies - 1) * copies  # a ring of only as many is a group, too
    if node < grouped:
        first = node - node % copies
        return tuple(other for other in range(first, first + copies) if other != node)
    return tuple(grouped + n for n in ring(node - grouped, nodes - grouped, copies))


def ring(node: int, nodes: int, copies: int) -> tuple[int, ...]:
    """The same, if each node's memory is copied to those that follow it."""
    return tuple((node + distance) % nodes for distance in range(1, copies))
