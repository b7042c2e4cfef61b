"""What the planner says to what was measured of a job with parameter servers."""

import pytest

pytest.importorskip("scipy")

from dlrover.master.machine.scaling.changes import Question
from dlrover.master.machine.scaling.planner import decide
from dlrover.planning.throughput import TrustRegion
from dlrover.spec.measurements import SpeedSample
from dlrover.spec.node import Size
from dlrover.spec.plan import ScaleKind


def sample(workers: int, servers: int, rate: float, **cores: float) -> SpeedSample:
    """Workers that make so many steps per second together."""
    return SpeedSample(
        nodes=workers,
        replicas=workers,
        step_seconds=workers / rate,
        steps=20,
        servers=servers,
        **cores,
    )


def ask(*samples: SpeedSample, workers=range(1, 7), servers=range(1, 5), explore=True):
    """With the last sample as the running world."""
    region = TrustRegion()
    return decide(
        Question(samples[-1], samples, list(workers), region, 0.5, explore, list(servers))
    )


def test_after_the_first_size_another_one_is_tried_although_nobody_knows():
    found = ask(sample(1, 1, 10.0))
    assert found.kind is ScaleKind.MEASURE
    assert found.size.nodes > 2
    assert found.plan.reason.startswith("1 -> 2 workers, 1 -> 2 servers: ")
    assert found.plan.effect.low < found.plan.effect.throughput < found.plan.effect.high


def test_once_the_size_is_found_nothing_is_tried_to_learn():
    assert ask(sample(1, 1, 10.0), explore=False) is None


def test_where_workers_wait_for_the_server_more_servers_are_planned():
    """Twice the workers brought nothing, twice the servers twice the speed."""
    found = ask(sample(1, 1, 10.0), sample(2, 1, 10.2), sample(1, 2, 10.5), sample(2, 2, 20.0))
    assert found.servers > 2


def test_where_servers_idle_only_workers_are_added():
    found = ask(sample(1, 1, 10.0), sample(1, 2, 10.0), sample(2, 1, 19.8))
    assert found.kind is ScaleKind.GROW
    assert found.size == Size(4, 1)
    assert found.plan.reason.startswith("2 -> 4 workers: +")
    assert found.plan.groups["worker"].count == 4
    assert found.plan.groups["ps"].count == 1


def test_a_measured_size_that_is_better_is_taken_again():
    found = ask(sample(2, 1, 20.0), sample(2, 3, 21.0))
    assert (found.kind, found.size) == (ScaleKind.SHRINK, Size(2, 1))
    assert found.plan.reason.startswith("3 -> 1 servers: -5% throughput for -40% cost")


def test_a_number_that_a_user_has_set_is_kept():
    found = ask(sample(1, 2, 10.0), sample(2, 2, 20.0), servers=[2])
    assert found.size == Size(4, 2)
    found = ask(sample(3, 1, 10.0), sample(3, 2, 20.0), workers=[3])
    assert found.size == Size(3, 4)


def test_a_server_that_is_larger_than_a_worker_costs_more():
    """One more server, of 16 cores, is four more workers."""
    cores = {"worker_cpu": 4.0, "server_cpu": 16.0}
    samples = [(2, 1, 16.0), (2, 2, 19.0)]
    cheap = ask(*[sample(*each) for each in samples])
    dear = ask(*[sample(*each, **cores) for each in samples])
    assert cheap.size.servers > 1
    assert (dear.kind, dear.size) == (ScaleKind.SHRINK, Size(2, 1))


def test_nodes_with_several_workers():
    two = [
        SpeedSample(nodes=n, replicas=4 * n, step_seconds=0.1, steps=20, servers=1) for n in (1, 2)
    ]
    found = ask(*two)
    assert found.size == Size(4, 1)
    assert found.plan.groups["worker"].count == 4
