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
"""Consecutive new groups, none of which completes an operation, after which the error is the program's."""


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
    """The rank whose state the joining ones take."""
    joining: list[int]


def regroup(places: Mapping[int, Place]) -> Regrouped:
    """Return what follows.

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
    source = min(at_top, key=lambda rank: (not places[rank].settled, rank))
    joining = [r for r in places if r not in usable or not places[r].settled]
    return Regrouped(top, at_top, source, [rank for rank in joining if rank != source])
