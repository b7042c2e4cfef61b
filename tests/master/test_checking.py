"""The orders of a node check: who is asked what, and what late, double and wrong answers change."""

import pytest

from dlrover.master.machine import inputs
from dlrover.master.machine.checks.checking import ANSWER_GRACE, Checks
from dlrover.spec.check import (
    CheckOrder,
    CheckReport,
    Component,
    FindingKind,
    ProbeResult,
    ProbeState,
)
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.world import Offer

SPEED = ProbeResult(component=Component.DEVICE, figure=100.0, unit="GFLOP/s")
TIME = ProbeResult(component=Component.NETWORK, figure=1.0, unit="ms")
SLOW = ProbeResult(component=Component.DEVICE, figure=10.0, unit="GFLOP/s")


def checks(**limits: object) -> Checks:
    return Checks(JobSpec(name="job", node_check=True, limits=Limits(**limits)))


def begin(machine: Checks, *nodes: int, now: float = 0.0) -> dict[int, CheckOrder]:
    offers = {node: Offer(1, f"host{node}", 29400 + node) for node in nodes}
    return orders(machine.begin(nodes, offers, now))


def orders(commands: list[inputs.Command]) -> dict[int, CheckOrder]:
    return {command.node_id: command.message for command in commands}


def answer(order: CheckOrder, *results: ProbeResult, **times: float) -> CheckReport:
    return CheckReport(check=order.check, round=order.round, results=results, **times)


def test_neighbours_meet_at_the_first_one_s_port():
    given = begin(checks(check_timeout=60.0), 4, 2, 7, now=5.0)
    assert {node: order.members for node, order in given.items()} == {4: (4, 2), 2: (4, 2), 7: (7,)}
    assert (given[2].store_addr, given[2].store_port) == ("host4", 29404)
    assert all(order.local and order.seconds == 60.0 for order in given.values())
    assert given[2].sent_at == 5.0


def test_only_nodes_that_are_due_are_checked_and_two_others_help():
    machine = checks()
    machine.passed = {0, 1, 2, 3}
    assert machine.due({0, 4}) == {4}
    given = begin(machine, 0, 1, 2, 3, 4)
    assert {node: order.members for node, order in given.items()} == {
        0: (0, 4), 4: (0, 4), 1: (1,),
    }  # fmt: skip


def test_a_report_counts_once_and_only_for_its_round():
    machine = checks()
    given = begin(machine, 0, 1)
    stale = CheckReport(check=7, round=1, results=())
    assert machine.take(0, stale, 1.0) == []
    assert machine.again(0) == [inputs.Say(0, given[0])]
    machine.take(0, answer(given[0], SPEED, TIME), 1.0)
    machine.take(0, answer(given[0]), 1.0)
    assert machine.again(0) == []
    assert machine.conclude() is None
    machine.take(1, answer(given[1], SPEED, TIME), 1.0)
    assert machine.conclude() == ([], {})
    assert machine.passed == {0, 1}


def test_a_slow_part_is_measured_again_and_the_better_figure_counts():
    machine = checks()
    given = begin(machine, 0, 1, 2, 3)
    for node in (0, 1, 2):
        assert machine.take(node, answer(given[node], SPEED, TIME), 1.0) == []
    again = orders(machine.take(3, answer(given[3], SLOW, TIME), 1.0))
    assert {node: (order.round, order.local, order.members) for node, order in again.items()} == {
        3: (2, True, (3,))
    }
    machine.take(3, answer(again[3], SPEED), 2.0)
    assert machine.conclude() == ([], {})


def test_what_failed_once_has_failed():
    machine = checks()
    broken = ProbeResult(component=Component.DISK, state=ProbeState.FAILED, message="full")
    given = begin(machine, 0, 1)
    machine.take(0, answer(given[0], broken, TIME), 1.0)
    machine.take(1, answer(given[1], SPEED, TIME), 1.0)
    found, out = machine.conclude()
    assert [(f.kind, f.nodes, f.message) for f in found] == [(FindingKind.FAULT, (0,), "full")]
    assert out.keys() == {0}
    assert machine.passed == {1}


def test_silence_is_a_fault_when_the_time_is_up_and_not_before():
    machine = checks(check_timeout=60.0)
    given = begin(machine, 0, now=100.0)
    assert machine.deadline() == 160.0 + ANSWER_GRACE
    assert given.keys() == {0}
    machine.time_out(159.0 + ANSWER_GRACE)
    assert machine.conclude() is None
    machine.time_out(160.0 + ANSWER_GRACE)
    found, out = machine.conclude()
    assert [(f.component, f.message) for f in found] == [
        (Component.AGENT, "it did not answer within 60 s")
    ]
    assert out.keys() == {0}


def test_a_node_that_is_lost_is_no_reason_to_suspect_the_one_it_met():
    machine = checks()
    given = begin(machine, 0, 1)
    failed = ProbeResult(component=Component.NETWORK, state=ProbeState.FAILED, message="gone")
    machine.take(0, answer(given[0], SPEED, failed), 1.0)
    machine.lose(1, 2.0)
    assert machine.conclude() == ([], {})


class Counted(int):
    """A node's number that counts how often one is looked for."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return int(self)

    def __eq__(self, other: object) -> bool:
        Counted.looks += 1
        return int(self) == other


def looks(count: int) -> int:
    """Looks at single nodes during a check of ``count`` ones, some of which are lost meanwhile."""
    machine, nodes = checks(), [Counted(number) for number in range(count)]
    given = begin(machine, *nodes)
    Counted.looks = 0
    for node in nodes:
        if node % 20 == 7:
            machine.lose(node, 1.0)
        else:
            machine.take(node, answer(given[node], SPEED, TIME), 1.0)
    while machine.run is not None and machine.run.orders:
        for node, order in list(machine.run.orders.items()):
            machine.take(node, answer(order, SPEED, TIME), 1.0)
    machine.conclude()
    return Counted.looks


def test_an_answer_costs_the_same_however_many_nodes_are_checked():
    """Otherwise the master needs minutes of CPU for 10,000 nodes, and does nothing else meanwhile."""
    assert looks(400) < 3 * looks(200)


@pytest.mark.parametrize(
    ("received", "sent", "words"),
    [
        (10.2, 13.8, None),
        (13.0, 17.0, "it is 3.0 s ahead of the master's"),
        (7.0, 11.0, "it is 3.0 s behind the master's"),
        (13.9, 14.0, None),
    ],
)
def test_a_clock_is_told_to_be_off_only_where_delays_do_not_explain_it(received, sent, words):
    machine = checks(clock_offset=1.0)
    given = begin(machine, 0, now=10.0)
    machine.take(0, answer(given[0], SPEED, received_at=received, sent_at=sent), 14.0)
    found, out = machine.conclude()
    assert [f.message for f in found] == ([words] if words else [])
    assert out == {}


def test_nobody_is_checked_unless_that_is_wanted():
    assert Checks(JobSpec(name="job")).due({0, 1}) == set()


def test_doubt_makes_a_node_due_again():
    machine = checks()
    machine.passed = {0, 1}
    machine.doubt({1, 5})
    assert machine.due({0, 1}) == {1}
