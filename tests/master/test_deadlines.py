"""The earliest deadline, beside a search."""

import random

import pytest

from dlrover.master.machine import inputs
from dlrover.master.machine.deadlines import Deadlines
from dlrover.master.machine.job import JobMachine
from dlrover.rpc.messages import Hello
from dlrover.spec.job import JobSpec


@pytest.mark.parametrize("seed", range(20))
def test_the_earliest_is_what_a_search_finds(seed: int) -> None:
    rng, deadlines = random.Random(seed), Deadlines()
    for _ in range(300):
        node = rng.randrange(10)
        if rng.random() < 0.5:
            deadlines[node] = float(rng.randrange(20))
        else:
            deadlines.pop(node, None)
        assert deadlines.earliest() == min(deadlines.values(), default=None)


def test_nodes_that_return_cost_the_same_however_many_are_away(monkeypatch) -> None:
    """A thousand nodes, each of which asks for the next deadline; a search looks at half a million."""
    looked = 0

    class Counted(Deadlines):
        def values(self):
            nonlocal looked
            looked += len(self)
            return super().values()

        def get(self, *args):
            nonlocal looked
            looked += 1
            return super().get(*args)

    count = 1000
    machine = JobMachine()
    machine.handle(inputs.Submitted(JobSpec(name="job", min_nodes=count, max_nodes=count), ""), 0.0)
    for number in range(count):
        machine.handle(Hello(f"uid-{number}"), 1.0)
    machine.state.lost_at = Counted()
    for number in range(count):
        machine.handle(inputs.NodeDisconnected(number), 2.0)
    assert machine.deadline() == machine.state.lost_at[0]
    for number in range(count):
        machine.handle(Hello(f"uid-{number}", node_id=number), 3.0)
        machine.deadline()
    assert not machine.state.lost_at
    assert looked <= 10 * count
