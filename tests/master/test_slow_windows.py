"""Samples of a world's speed beside the windows in which its ranks are compared: a slow rank spoils none of them."""

from __future__ import annotations

from dlrover.master.machine import inputs
from dlrover.master.machine.watches.slow import SpeedWatch
from dlrover.master.scaling.autoscale import AutoScaler
from dlrover.rpc import messages
from dlrover.spec.activity import Activity
from dlrover.spec.job import Limits
from dlrover.spec.measurements import WorkerActivity
from tests.support.drivers import JobDriver

WINDOW = 10
RANKS = 3


class World:
    """Nodes with a rank each that make two steps in a second. The ranks are compared at 21, 31, 41, ..."""

    def __init__(self, began: int = 15) -> None:
        """Start the first sample's window at second ``began``."""
        limits = Limits(slow_rank_window=WINDOW, autoscale_window=WINDOW)
        self.job = JobDriver.launched(1, RANKS, auto_scale=True, limits=limits)
        self.samples: list[tuple[float, bool]] = []
        """Second of each sample's submission, and whether a slow rank may have held up the world."""
        self.watch = SpeedWatch(limits)
        self.scaler = AutoScaler(self.job.machine, self._submit, self.watch.held_up)
        self._began, self._computed = began, [0.0] * RANKS

    def _submit(self, event: inputs.Input) -> None:
        assert isinstance(event, inputs.SpeedMeasured)
        self.samples.append((self.job.now, event.held_up))
        self.job.give(event)

    def run(self, until: int, slow: int = 10**6, comparing: bool = True) -> None:
        """Train; rank 0 takes twice the time of the others from second ``slow`` on."""
        for now in range(int(self.job.now) + 1, until + 1):
            self.job.now = float(now)
            steps = max(0, 5 + 2 * (now - self._began))
            told = {}
            for rank in range(RANKS):
                self._computed[rank] += 0.8 if rank == 0 and now > slow else 0.4
                seconds = [0.0] * len(Activity)
                seconds[Activity.STEP] = now
                told[rank] = WorkerActivity(
                    steps, Activity.STEP, 0.0, tuple(seconds), self._computed[rank]
                )
                beat = messages.Heartbeat(1, steps, (told[rank],))
                self.scaler.take_heartbeat(rank, beat, now)
            if comparing:
                self.watch.compare(told, dict(enumerate(range(RANKS))), now)
            self.scaler.measure(now)


def test_a_sample_waits_for_the_comparison_of_its_ranks() -> None:
    world = World()
    world.run(60, slow=32)
    assert world.samples[0] == (25.0, False), "nothing to spoil: the first of this size"
    assert world.samples[1:3] == [(41.0, True), (45.0, True)]
    (kept,) = world.job.machine.autoscaling.samples.values()
    assert len(kept) == 1


def test_a_sample_of_even_ranks_counts() -> None:
    world = World()
    world.run(60)
    assert world.samples == [(25.0, False), (41.0, False), (51.0, False)]


def test_a_comparison_that_does_not_end_holds_a_sample_for_one_window() -> None:
    world = World()
    world.run(12)
    world.run(60, comparing=False)
    assert world.samples == [(25.0, False), (45.0, False), (56.0, False)]
