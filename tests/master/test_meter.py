"""Speed samples from what the workers of a round report."""

import pytest

from dlrover.master.machine.watches.meter import (
    LATE_WINDOWS,
    MIN_STEPS,
    WARM_UP_STEPS,
    Meter,
    Servers,
)
from dlrover.spec.activity import Activity
from dlrover.spec.job import Limits
from dlrover.spec.measurements import WorkerActivity

WINDOW = 10.0
STEP = 0.5


def worker(steps: int, *, step: float = STEP, compute: float = 0.3, **more: object):
    """A worker that has made so many steps, and is a fifth into the next one."""
    begun = step / 5
    seconds = [0.0] * len(Activity)
    seconds[Activity.START] = 7.0
    seconds[Activity.STEP] = steps * step + begun
    for name, value in more.pop("spent", {}).items():
        seconds[Activity[name]] = value
    return WorkerActivity(
        steps, Activity.STEP, begun, tuple(seconds), compute * steps, **{"ended": False, **more}
    )


def meter() -> Meter:
    return Meter(Limits(autoscale_window=WINDOW))


def measured(made: Meter, replicas: int = 2):
    return made.take(nodes=2, replicas=replicas, now=100.0 + WINDOW)


def test_a_window_of_steady_steps_is_a_sample():
    made = meter()
    made.note({0: worker(10), 1: worker(10)}, 100.0)
    made.note({0: worker(30), 1: worker(30)}, 100.0 + WINDOW)
    sample = measured(made)
    assert sample.step_seconds == pytest.approx(STEP)
    assert sample.compute_seconds == pytest.approx(0.3)
    assert (sample.nodes, sample.replicas, sample.steps) == (2, 2, 20)
    assert sample.throughput == pytest.approx(2 / STEP)
    assert sample.unit == "worker steps/s"


def test_the_first_steps_of_a_round_do_not_count():
    made = meter()
    made.note({0: worker(WARM_UP_STEPS - 1, step=9.0)}, 80.0)
    made.note({0: worker(10)}, 100.0)
    made.note({0: worker(30)}, 100.0 + WINDOW)
    assert measured(made).step_seconds == pytest.approx(STEP)


def test_a_window_goes_on_until_it_has_its_time_and_enough_steps():
    made = meter()
    made.note({0: worker(10)}, 100.0)
    made.note({0: worker(10 + MIN_STEPS - 1)}, 105.0)
    assert made.take(2, 2, 100.0 + WINDOW) is None
    made.note({0: worker(10 + MIN_STEPS)}, 115.0)
    assert made.take(2, 2, 100.0 + WINDOW - 0.1) is None
    assert made.take(2, 2, 115.0) is not None


def test_each_window_begins_where_the_last_one_ended():
    made = meter()
    made.note({0: worker(10)}, 100.0)
    made.note({0: worker(30)}, 100.0 + WINDOW)
    assert measured(made).step_seconds == pytest.approx(STEP)
    slower = worker(50)
    slower = WorkerActivity(50, slower.doing, 0.2, (7.0, 15.0 + 20 + 0.2, 0, 0, 0, 0), 0.0)
    made.note({0: slower}, 130.0)
    assert made.take(2, 2, 130.0).step_seconds == pytest.approx(1.0)


def test_evaluation_and_checkpoints_are_no_part_of_a_step_but_waiting_for_data_is():
    made = meter()
    made.note({0: worker(10)}, 100.0)
    made.note({0: worker(30, spent={"EVAL": 9.0, "CHECKPOINT": 4.0, "DATA": 2.0})}, 110.0)
    assert measured(made).step_seconds == pytest.approx(STEP + 2.0 / 20)


def test_the_median_rank_counts_and_a_rank_that_reports_late_does_not_hold_it_up():
    made = meter()
    made.note({rank: worker(10) for rank in range(4)}, 100.0)
    made.note({0: worker(30), 1: worker(30), 2: worker(30, compute=0.4)}, 110.0)
    assert measured(made, 4).compute_seconds == pytest.approx(0.3)


def test_a_compute_time_that_is_the_whole_step_says_nothing():
    made = meter()
    made.note({0: worker(10, compute=STEP)}, 100.0)
    made.note({0: worker(30, compute=STEP)}, 110.0)
    assert measured(made).compute_seconds is None


def test_one_worker_waits_for_nobody():
    made = meter()
    made.note({0: worker(10)}, 100.0)
    made.note({0: worker(30)}, 110.0)
    assert measured(made, 1).compute_seconds is None


def test_a_fixed_global_batch_gives_samples_per_second():
    made = meter()
    made.note({0: worker(10, total_batch=96)}, 100.0)
    made.note({0: worker(30, total_batch=96)}, 110.0)
    sample = measured(made)
    assert sample.throughput == pytest.approx(96 / STEP)
    assert sample.unit == "samples/s"


def test_a_new_round_forgets_the_old_one_and_ended_workers_do_not_count():
    made = meter()
    made.note({0: worker(10)}, 100.0)
    made.begin()
    made.note({0: worker(30, ended=True)}, 110.0)
    assert made.take(2, 2, 200.0) is None


def test_the_profile_is_that_of_the_largest_part():
    made = meter()
    assert made.profile.parameters == 0
    small = worker(10, parameters=5, parameter_bytes=20, state_bytes=40)
    large = worker(10, parameters=7, parameter_bytes=28, state_bytes=56)
    made.note({0: small, 1: large}, 100.0)
    assert (made.profile.parameters, made.profile.state_bytes) == (7, 56)


def test_workers_of_servers_go_at_their_own_pace_and_their_rates_add_up():
    made = meter()
    made.note({0: worker(10), 1: worker(10, step=2 * STEP)}, 100.0)
    made.note({0: worker(30), 1: worker(20, step=2 * STEP)}, 100.0 + WINDOW)
    sample = made.take(2, 2, 100.0 + WINDOW, Servers(3, worker_cpu=4.0, server_cpu=2.0))
    assert sample.throughput == pytest.approx(1 / STEP + 1 / (2 * STEP))
    assert (sample.size, sample.cost(sample.size)) == ((2, 3), 3.5)
    assert sample.unit == "worker steps/s"


def test_a_worker_of_servers_that_makes_no_steps_is_waited_for_a_few_windows():
    made = meter()
    made.note({0: worker(10), 1: worker(10)}, 100.0)
    made.note({0: worker(30), 1: worker(10 + MIN_STEPS - 1)}, 100.0 + WINDOW)
    assert made.take(2, 2, 100.0 + WINDOW, Servers(1)) is None
    sample = made.take(2, 2, 100.0 + LATE_WINDOWS * WINDOW, Servers(1))
    assert sample.throughput == pytest.approx(1 / STEP)
