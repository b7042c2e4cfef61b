"""Nodes that will run out of memory are found before they do."""

import pytest

from dlrover.master.machine.watches.memorywatch import LEAST, MemoryWatch
from dlrover.planning.memory import GIB
from dlrover.spec.measurements import NodeUsage

HORIZON = 1800.0
LOOKS = 15.0
LIMIT = 16 * GIB


def watched(use, count: int = 40, limit: int = LIMIT):
    """The advice of each look at a node whose use is a function of the time."""
    watch = MemoryWatch()
    looks = [i * LOOKS for i in range(count)]
    return [look(watch, int(use(at)), limit, at) for at in looks], watch


def look(watch, used: int, limit: int, at: float):
    watch.note(3, NodeUsage(1.0, used, limit), at)
    return watch.advice(3, limit, HORIZON, at)


def growing(bytes_per_second: float):
    return lambda at: 8 * GIB + bytes_per_second * at


def test_a_node_that_will_run_out_within_the_horizon_is_named_once():
    found, _ = watched(growing(8 * GIB / HORIZON))
    named = [advice for advice in found if advice is not None]
    assert len(named) == 1
    assert named[0].memory > LIMIT
    assert named[0].reason.startswith("node 3 is expected to need")


@pytest.mark.parametrize(
    "use",
    [
        growing(GIB / HORIZON),
        lambda at: 15 * GIB,
        lambda at: 10 * GIB + (at // LOOKS % 5) * GIB,
    ],
    ids=["it lasts for longer", "it is full, but no more", "it goes up and down"],
)
def test_a_node_that_has_enough_is_left_alone(use):
    assert not any(watched(use)[0])


def test_the_first_looks_show_how_a_program_fills_its_memory_and_do_not_count():
    assert not any(watched(growing(8 * GIB / 60), count=LEAST - 1)[0])


def test_without_a_limit_nothing_can_be_foreseen():
    assert not any(watched(growing(GIB), limit=0)[0])


def test_a_new_round_begins_with_empty_memory():
    _, watch = watched(growing(GIB / HORIZON))
    watch.begin()
    assert look(watch, 15 * GIB, LIMIT, 1000.0) is None
