"""What a node check has found so far, and what good and bad meetings of nodes say of them."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from dlrover.spec.check import Component, ProbeResult, ProbeState


class Kind(str, enum.Enum):
    """What a finding says of its nodes."""

    FAULT = "fault"
    SLOW = "slow"
    LINK = "link"
    """Two nodes work, but not with each other."""
    UNDETERMINED = "undetermined"
    """At least one of the nodes is at fault, and nothing tells which."""
    UNTESTED = "untested"
    """The node met no node that is known to be sound."""
    NOTE = "note"
    """Worth knowing; no reason to leave a node out."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that a check found."""

    kind: Kind
    nodes: tuple[int, ...]
    component: Component
    message: str


class Trial(msgspec.Struct, frozen=True):
    """Two nodes that checked the network between them."""

    nodes: tuple[int, int]
    slowness: float = 0.0
    """Grows with the time it took; 0.0 where nothing was measured."""
    failed: str = ""
    """Why it failed; empty if it did not."""

    def partner(self, node: int) -> int:
        """The other node."""
        first, second = self.nodes
        return second if node == first else first


@dataclass
class Evidence:
    """Everything that a check has found so far."""

    #: all nodes of the check, in order of rank
    nodes: tuple[int, ...]
    #: what each node found of its own parts; nothing for one that has not answered
    local: dict[int, tuple[ProbeResult, ...]] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    #: nodes known to be sound from an earlier check: they are here to help
    trusted: frozenset[int] = frozenset()


class Standing(msgspec.Struct, frozen=True):
    """What a set of bad and good trials says of the nodes."""

    sound: frozenset[int]
    guilty: frozenset[int]
    """Bad with two sound nodes."""
    links: tuple[tuple[int, int], ...]
    """Bad pairs of two sound nodes."""
    doubtful: frozenset[int]
    """In a bad trial, and neither sound nor guilty."""


def named(found: Iterable[Finding], *kinds: Kind) -> set[int]:
    """The nodes that findings of these kinds name."""
    return {node for finding in found if finding.kind in kinds for node in finding.nodes}


def better(first: Sequence[ProbeResult], again: Sequence[ProbeResult]) -> tuple[ProbeResult, ...]:
    """Two measurements of a node's parts as one: what failed once has failed, else the faster counts."""
    best: dict[tuple[Component, str], ProbeResult] = {}
    for result in (*first, *again):
        key = result.component, result.name
        old = best.get(key)
        replaces = old is None or (
            old.state is not ProbeState.FAILED
            and (result.state is ProbeState.FAILED or 0 < result.slowness < old.slowness)
        )
        if replaces:
            best[key] = result
    return tuple(best.values())


def standing(
    bad: Collection[tuple[int, int]],
    good: Collection[tuple[int, int]],
    trusted: Collection[int] = (),
) -> Standing:
    """What bad and good meetings say; ``trusted`` nodes are known to be sound."""
    sound = frozenset(trusted).union(*good)
    meetings: dict[int, set[int]] = {}
    for first, second in bad:
        meetings.setdefault(first, set()).add(second)
        meetings.setdefault(second, set()).add(first)
    guilty = frozenset(
        node for node, met in meetings.items() if node not in sound and len(met & sound) > 1
    )
    links = {(min(pair), max(pair)) for pair in bad if set(pair) <= sound}
    return Standing(
        sound=sound,
        guilty=guilty,
        links=tuple(sorted(links)),
        doubtful=frozenset(meetings) - sound - guilty,
    )
