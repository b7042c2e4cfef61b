"""Evidence of a node check: what is known so far, and what good and bad trials say of the nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from dlrover.spec.check import CheckFinding, Component, FindingKind, ProbeResult, ProbeState


class Trial(msgspec.Struct, frozen=True):
    """A network check between two nodes."""

    nodes: tuple[int, int]
    slowness: float = 0.0
    """A figure that grows with the time of the check; 0.0 if not measured."""
    failed: str = ""
    """Why it failed; empty if it passed."""

    def partner(self, node: int) -> int:
        """Return the other node."""
        first, second = self.nodes
        return second if node == first else first


@dataclass
class CheckEvidence:
    """Everything that a check has found so far."""

    #: all nodes of the check, in order of rank
    nodes: tuple[int, ...]
    #: results of each node's own parts; no entry for a node that has not answered
    local: dict[int, tuple[ProbeResult, ...]] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)
    #: nodes that an earlier check found sound; they take part as helpers
    trusted: frozenset[int] = frozenset()


class Standing(msgspec.Struct, frozen=True):
    """Classification of the nodes by a set of bad and good trials."""

    sound: frozenset[int]
    guilty: frozenset[int]
    """Nodes that are not known to be sound and failed with at least two sound nodes."""
    links: tuple[tuple[int, int], ...]
    """Bad pairs of two sound nodes."""
    doubtful: frozenset[int]
    """Nodes with a bad trial that are neither sound nor guilty."""


def named(found: Iterable[CheckFinding], *kinds: FindingKind) -> set[int]:
    """Return the nodes named by findings of these kinds."""
    return {node for finding in found if finding.kind in kinds for node in finding.nodes}


def better(first: Sequence[ProbeResult], again: Sequence[ProbeResult]) -> tuple[ProbeResult, ...]:
    """Merge two measurements of a node's parts: a failure in either counts, else the faster result."""
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
    """Classify the nodes by bad and good pairs; ``trusted`` nodes are known to be sound."""
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
