"""The node check names what is at fault, says where that cannot be told, and is never wrong.

The fault model is the one that `dlrover.master.machine.checks.nodecheck` states. Measurements are simulated: a part
or a pair takes its time, with some scatter, and a slow one three times as long.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.master.machine.checks import nodecheck
from dlrover.master.machine.checks.evidence import CheckEvidence, Trial, named
from dlrover.spec.check import CheckFinding, Component, FindingKind, ProbeResult, ProbeState

ROUNDS = 4
RATIO = 2.0
SCATTER = 0.2
SLOW = 3.0
CONDITIONS = ("ok", "part", "part and network", "network", "slow part", "slow network")
FAULTS = ("part", "part and network", "network")


@dataclass
class Nodes:
    """Simulated nodes: one condition each, and broken links between some."""

    conditions: dict[int, str]
    links: frozenset[frozenset[int]] = frozenset()
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def part(self, node: int) -> tuple[ProbeResult, ...]:
        condition = self.conditions[node]
        if condition.startswith("part"):
            failed = ProbeState.FAILED
            return (ProbeResult(component=Component.DEVICE, state=failed, message="broken"),)
        speed = self._scatter() / (SLOW if condition == "slow part" else 1.0)
        return (ProbeResult(component=Component.DEVICE, figure=speed, unit="GFLOP/s"),)

    def meet(self, first: int, second: int) -> Trial:
        conditions = {self.conditions[first], self.conditions[second]}
        if conditions & {"network", "part and network"} or frozenset((first, second)) in self.links:
            return Trial((first, second), failed="no connection")
        slow = SLOW if "slow network" in conditions else 1.0
        return Trial((first, second), slowness=slow * self._scatter())

    def _scatter(self) -> float:
        return 1 + SCATTER * self.chance.random()

    def check(self) -> tuple[list[CheckFinding], int]:
        """The findings, and the number of rounds."""
        evidence = CheckEvidence(tuple(self.conditions))
        groups = nodecheck.first_pairs(evidence.nodes)
        evidence.local = {node: self.part(node) for node in evidence.nodes}
        rounds = 0
        while groups and rounds < ROUNDS:
            rounds += 1
            members = [node for group in groups for node in group]
            assert len(members) == len(set(members)), "a node is in two groups at once"
            evidence.trials += [self.meet(*group) for group in groups if len(group) == 2]
            groups = nodecheck.next_pairs(evidence, RATIO)
        return nodecheck.findings(evidence, RATIO), rounds

    def having(self, *conditions: str) -> set[int]:
        return {node for node, condition in self.conditions.items() if condition in conditions}


def judge(nodes: Nodes) -> str:
    """``exact`` or ``undetermined``; fails if the check is wrong."""
    found, _ = nodes.check()
    told = {kind: named(found, kind) for kind in FindingKind}
    open_ = told[FindingKind.UNDETERMINED] | told[FindingKind.UNTESTED]
    faults = nodes.having(*FAULTS)
    context = (nodes.conditions, nodes.links, found)
    assert told[FindingKind.FAULT] <= faults, context
    assert faults - told[FindingKind.FAULT] <= open_, context
    links = {frozenset(f.nodes) for f in found if f.kind is FindingKind.LINK}
    assert links <= nodes.links, context
    for finding in found:
        if finding.kind is FindingKind.UNDETERMINED:  # there is a fault among them, or between them
            explained = set(finding.nodes) & faults
            assert explained or any(link & set(finding.nodes) for link in nodes.links), context
    sound = set(nodes.conditions) - faults
    exact = told[FindingKind.FAULT] == faults and not open_ and links == nodes.links
    for kind, component in (("slow part", Component.DEVICE), ("slow network", Component.NETWORK)):
        slow = nodes.having(kind)
        slower = {
            n
            for f in found
            if f.kind is FindingKind.SLOW and f.component is component
            for n in f.nodes
        }
        noted = {
            n
            for f in found
            if f.kind is FindingKind.NOTE and f.component is component
            for n in f.nodes
        }
        assert slower <= slow, context
        if 2 * len(slow) < len(sound):  # else they are not slower than the others
            missing = slow - slower - noted - open_
            assert not missing, (missing, context)
            exact = exact and slower == slow and not noted
    return "exact" if exact else "undetermined"


def verdicts(count: int, conditions: Iterable[str]) -> dict[str, int]:
    """How often the verdict is exact over every assignment of conditions to ``count`` nodes."""
    tally = {"exact": 0, "undetermined": 0}
    for assigned in itertools.product(conditions, repeat=count):
        tally[judge(Nodes(dict(enumerate(assigned))))] += 1
    return tally


# ---- every subset


@pytest.mark.parametrize(
    "count", [2, 3, 4, 5, 6, *(pytest.param(n, marks=pytest.mark.slow) for n in (7, 8))]
)
def test_every_subset_of_faulty_and_slow_nodes_is_told_or_said_to_be_undetermined(count):
    tally = verdicts(count, ("ok", "network", "slow network"))
    assert tally["exact"] > tally["undetermined"] * (0.75 if count > 2 else 0.5)


@pytest.mark.parametrize("count", [2, 3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_the_same_with_faults_of_every_part(count):
    verdicts(count, CONDITIONS)


@pytest.mark.parametrize("count", [3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_the_same_with_a_broken_link(count):
    for link in itertools.combinations(range(count), 2):
        for assigned in itertools.product(("ok", "network", "slow network"), repeat=count):
            judge(Nodes(dict(enumerate(assigned)), frozenset({frozenset(link)})))


@pytest.mark.parametrize("count", range(3, 13))
@pytest.mark.parametrize("condition", CONDITIONS[1:])
def test_one_bad_node_is_always_told(count, condition):
    for bad in range(count):
        nodes = Nodes(dict.fromkeys(range(count), "ok") | {bad: condition})
        assert judge(nodes) == "exact"


@pytest.mark.parametrize("count", range(4, 13))
def test_one_broken_link_is_always_told_if_its_nodes_meet(count):
    nodes = Nodes(dict.fromkeys(range(count), "ok"), frozenset({frozenset({0, 1})}))
    judge(nodes)
    assert [f.nodes for f in nodes.check()[0] if f.kind is FindingKind.LINK] == [(0, 1)]


@pytest.mark.parametrize("bad", ["part", "slow part"])
def test_faults_of_parts_are_told_of_any_minority(bad):
    for size in range(4):
        for chosen in itertools.combinations(range(8), size):
            conditions = dict.fromkeys(range(8), "ok") | dict.fromkeys(chosen, bad)
            found, _ = Nodes(conditions).check()
            kind = FindingKind.FAULT if bad == "part" else FindingKind.SLOW
            assert named(found, kind) == set(chosen)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_larger_checks_are_never_wrong(data):
    count = data.draw(st.integers(2, 60))
    weights = data.draw(st.sampled_from([("ok",), ("ok",) * 20, CONDITIONS]))
    condition = st.sampled_from((*weights, *CONDITIONS))
    conditions = {node: data.draw(condition) for node in range(count)}
    order = data.draw(st.permutations(range(count)))
    links = data.draw(st.integers(0, min(3, count // 2)))
    broken = frozenset(frozenset(order[2 * i : 2 * i + 2]) for i in range(links))
    judge(Nodes(conditions, broken, random.Random(data.draw(st.integers(0, 1000)))))


@pytest.mark.parametrize("faults", [0, 1, 3])
def test_a_few_bad_nodes_among_many_are_told_in_three_rounds(faults):
    bad = dict.fromkeys(random.Random(faults).sample(range(2048), faults), "network")
    nodes = Nodes(dict.fromkeys(range(2048), "ok") | bad)
    found, rounds = nodes.check()
    assert named(found, FindingKind.FAULT) == bad.keys()
    assert rounds == (3 if faults else 1)


# ---- rounds


@pytest.mark.parametrize(("count", "rounds"), [(1, 1), (2, 1), (3, 3), (4, 1), (5, 3), (8, 1)])
def test_sound_nodes_need_no_further_round_than_one_unless_their_number_is_odd(count, rounds):
    found, taken = Nodes(dict.fromkeys(range(count), "ok")).check()
    assert (found, taken) == ([], rounds)


def trial(first: int, second: int, slowness: float = 1.0) -> Trial:
    return Trial((first, second), slowness)


def failed(first: int, second: int) -> Trial:
    return Trial((first, second), failed="timed out")


def test_the_second_round_pairs_the_slowest_with_the_fastest():
    trials = [trial(0, 1, 5.0), trial(2, 3, 1.5), trial(4, 5, 1.0), trial(6, 7, 4.0)]
    pairs = nodecheck.next_pairs(CheckEvidence(tuple(range(8)), trials=trials), RATIO)
    assert pairs == [(4, 0), (5, 1), (2, 6), (3, 7)]


def test_suspects_meet_sound_nodes():
    trials = [failed(0, 1), trial(2, 3), trial(4, 5)]
    pairs = nodecheck.next_pairs(CheckEvidence(tuple(range(6)), trials=trials), RATIO)
    assert pairs == [(2, 0), (3, 1)]


def test_a_node_that_was_checked_before_helps_to_check_another():
    evidence = CheckEvidence((0, 5), trials=[failed(0, 5)], trusted=frozenset({0}))
    (finding,) = nodecheck.findings(evidence, RATIO)
    assert (finding.kind, finding.nodes) == (FindingKind.UNDETERMINED, (5,))


# ---- what follows


def test_what_is_left_out():
    evidence = CheckEvidence(tuple(range(8)), trials=[failed(0, 1), trial(0, 2), trial(1, 3)])
    evidence.local[4] = Nodes({4: "part"}).part(4)
    found = nodecheck.findings(evidence, RATIO)
    assert {node: f.kind for node, f in nodecheck.left_out(found, stragglers=False).items()} == {
        4: FindingKind.FAULT,
        1: FindingKind.LINK,
    }


def test_slow_nodes_are_left_out_only_if_wanted():
    found, _ = Nodes({0: "ok", 1: "slow part", 2: "ok", 3: "ok"}).check()
    assert nodecheck.left_out(found, stragglers=False) == {}
    assert nodecheck.left_out(found, stragglers=True).keys() == {1}


def test_a_slow_disk_is_not_judged():
    def disk(speed: float) -> tuple[ProbeResult, ...]:
        return (ProbeResult(component=Component.DISK, figure=speed, unit="MB/s"),)

    evidence = CheckEvidence((0, 1, 2), {0: disk(500.0), 1: disk(500.0), 2: disk(5.0)})
    kinds = {finding.kind for finding in nodecheck.findings(evidence, RATIO)}
    assert FindingKind.SLOW not in kinds
