"""The simulator of a cluster, on jobs whose ends can be told by hand."""

import pytest

from tests.support.workload import Setting, SimulatedJob, replay

SETTING = Setting(nodes=2, slots=2, tick=10.0, restart=5.0)


class Kind:
    """100 steps per epoch; a step takes 1 s on one replica and half of it on two."""

    name, reference_batch, most_batch = "kind", 8, 64
    replica_least, replica_most, epochs = 1, 64, 2

    def times(self, replicas, batch):
        return 1.0 / sum(replicas), 0.25

    def gradients(self, batch, epoch):
        return 0.0, 1.0  # pure noise: progress is in proportion to the batch

    def progress(self, epoch):
        return 100.0 * epoch


class Alone:
    """Gives each job what the test says, and the reference batch."""

    name = "alone"

    def __init__(self, placements, passes=1, change=None):
        self.placements, self.passes, self.change = placements, passes, change

    def divide(self, now, jobs, setting):
        if self.change is not None and now >= self.change[0]:
            self.placements = self.change[1]
        return {job.name: self.placements[job.name] for job in jobs if job.name in self.placements}

    def batch(self, job):
        return 8 // job.replicas, self.passes


def job(name="a", submitted=0.0):
    return SimulatedJob(name, Kind(), submitted, wanted_replicas=1, wanted_batch=8)


def test_a_job_ends_after_its_wait_its_start_and_its_steps():
    found = replay([job()], Alone({"a": (1, 0)}), SETTING)
    assert found.completion == {"a": 10 + 5 + 200}  # first tick, restart, steps
    assert found.restarts == 0
    assert found.used == pytest.approx(205 / (4 * 215))


def test_more_replicas_are_faster_and_counted():
    a = job()
    found = replay([a], Alone({"a": (2, 0)}), SETTING)
    assert found.completion == {"a": 10 + 5 + 100}
    assert a.measured == {(1, 2, 4): (0.5, 0.25)}
    assert a.service == 2 * 105


def test_a_larger_batch_makes_more_of_a_step():
    found = replay([job()], Alone({"a": (1, 0)}, passes=2), SETTING)
    epoch = round(50 * (1.0 + 0.75))  # pure noise makes a step of two batches worth two
    assert found.completion == {"a": 10 + 5 + 2 * epoch}


def test_a_change_costs_a_restart():
    policy = Alone({"a": (1, 0)}, change=(100, {"a": (0, 1)}))
    found = replay([job()], policy, SETTING)
    assert found.completion == {"a": 10 + 5 + 200 + 5}
    assert found.restarts == 1


def test_a_job_comes_when_it_is_submitted_and_waits_without_a_placement():
    policy = Alone({"b": (1, 0)}, change=(300, {"a": (1, 0), "b": (1, 0)}))
    found = replay([job("a"), job("b", submitted=15.0)], policy, SETTING)
    assert found.completion["b"] == 20 + 5 + 200 - 15
    assert found.completion["a"] == 300 + 5 + 200
    assert found.average == (found.completion["a"] + found.completion["b"]) / 2
    assert found.percentile(0.5) == found.completion["b"]
    assert found.percentile(1.0) == found.completion["a"]


def test_a_policy_that_gives_too_much_is_refused():
    with pytest.raises(ValueError, match="node 0 has 2 accelerators, not 3"):
        replay([job("a"), job("b")], Alone({"a": (2, 0), "b": (1, 0)}), SETTING)
