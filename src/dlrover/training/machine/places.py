"""Where the ranks of a new group are, and what follows: which state counts, who sends it, and who takes it.

All ranks of the group decide the same, from what each has sent to the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dlrover.errors import InfrastructureError

NEWS_LIMIT = 2.0
"""Seconds after an error without a lost rank until the ranks connect anew."""
EXCLUDED_LIMIT = 60.0
"""Seconds for which a rank that does not train waits to be ended."""
RENEWALS = 5
"""Consecutive new groups without a completed operation, after which the error is the program's."""


class Place(NamedTuple):
    """Where a rank is. It tells the others."""

    position: int
    """Position of its next operation."""
    usable: bool
    """True if it has the state that belongs to its position."""
    complete: bool
    """True if it has all of the result of this operation."""
    settled: bool
    """True if it has been in a group before."""


class Regrouped(NamedTuple):
    """What follows from the places of all ranks of a group."""

    top: int
    """Position at which the group goes on."""
    at_top: list[int]
    """The ranks that are there with their state. Others that have one finish the operation before."""
    source: int
    """First rank of the row whose state the joining ones take, each from the rank with its place in the row."""
    joining: list[int]


def regroup(places: Mapping[int, Place], row: int = 1) -> Regrouped:
    """Return what follows; ``row`` consecutive ranks have a state together.

    Raises:
        InfrastructureError: No state counts: none is usable, or a rank lacks a result on which others have continued.
    """
    usable = {rank: place for rank, place in places.items() if place.usable}
    if not usable:
        raise InfrastructureError("No rank has a state to train with.")
    top = max(place.position for place in usable.values())
    behind = [rank for rank, place in usable.items() if place.position < top]
    if not all(places[rank].complete for rank in behind):
        raise InfrastructureError(f"Ranks {behind} lack what others have.")
    at_top = [rank for rank, place in usable.items() if place.position == top]
    whole = [r for r in at_top if r % row == 0 and set(range(r, r + row)) <= set(at_top)]
    if not whole:
        raise InfrastructureError("No row of ranks has a state to train with.")
    source = min(whole, key=lambda rank: (not places[rank].settled, rank))
    joining = [r for r in places if r not in usable or not places[r].settled]
    return Regrouped(top, at_top, source, [r for r in joining if r - r % row != source])
