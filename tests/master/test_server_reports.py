"""What servers report of themselves: they make no steps, and nobody is to wait for one."""

from __future__ import annotations

import asyncio

from dlrover.master.hangwatch import HangWatch
from dlrover.master.machine import inputs
from dlrover.master.scaling.autoscale import AutoScaler
from dlrover.master.service import status_of
from dlrover.rpc import messages
from dlrover.spec.activity import Activity
from dlrover.spec.failure import FailureKind
from dlrover.spec.job import Limits
from dlrover.spec.measurements import WorkerActivity
from tests.support.drivers import JobDriver


def driver(**limits: object) -> JobDriver:
    """A job whose node 0 has two workers; node 1 is a server."""
    made = JobDriver(
        1, 2, managed_nodes=1, auto_scale=True, servers=1, min_servers=1, max_servers=1,
        limits=Limits(**limits),
    )  # fmt: skip
    for node in range(2):
        made.give(inputs.NodePlaced(node, f"process {node}"))
        made.connect(node, claims=node)
    made.join(0, 1, at=10.0)
    assert made.machine.rounds.workers == 2
    return made


def activity(steps: int, doing: Activity, since: float) -> WorkerActivity:
    seconds = [0.0] * len(Activity)
    seconds[Activity.STEP] = 0.5 * steps
    seconds[doing] += since
    return WorkerActivity(steps, doing, since, tuple(seconds))


def beat(steps: int, doing: Activity, since: float, count: int = 2) -> messages.Heartbeat:
    return messages.Heartbeat(1, steps, (activity(steps, doing, since),) * count)


def test_a_server_that_starts_for_ever_hides_no_hang_of_the_workers() -> None:
    machine = driver(hang_sample_gap=0.02).machine
    asked: list[int] = []

    async def story() -> None:
        watch = HangWatch(machine, lambda node, _message: asked.append(node), lambda _event: None)
        watch.take_heartbeat(1, beat(0, Activity.START, 20.0, 1), 30.0)
        watch.take_heartbeat(0, beat(5, Activity.STEP, 1000.0), 30.0)
        assert watch.doing() == {0: "step 1000 s", 1: "serve 20 s"}
        running = asyncio.create_task(watch.run(lambda: 31.0))
        while not asked:
            await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(asyncio.wait_for(story(), 10.0))
    assert asked == [0, 1], "all are looked at"


def test_only_workers_are_measured() -> None:
    machine = driver(autoscale_window=5.0).machine
    made: list[inputs.Input] = []
    scaler = AutoScaler(machine, made.append)
    for seconds in (0, 10):
        scaler.take_heartbeat(0, beat(10 + 2 * seconds, Activity.STEP, 0.0), 20.0 + seconds)
        scaler.take_heartbeat(1, beat(100 + 9 * seconds, Activity.STEP, 0.0, 1), 20.0 + seconds)
    scaler.measure(30.0)
    (measured,) = made
    assert isinstance(measured, inputs.SpeedMeasured)
    sample = measured.sample
    assert (sample.nodes, sample.replicas, sample.steps) == (1, 2, 20)


def test_the_steps_of_a_servers_optimizer_are_not_the_trainings() -> None:
    job = driver()
    job.give(inputs.Progressed(1, 5), at=20.0)
    assert status_of(job.machine, 21.0, {0: 6, 1: 900}).steps == 6
    job.fail(1, {"kind": FailureKind.EXIT, "exit_code": 3, "steps": 900}, at=22.0)
    assert job.machine.progress.total_steps == 5


def test_the_status_tells_roles_apart() -> None:
    status = status_of(driver().machine, 11.0, {})
    assert [node.role for node in status.nodes] == ["worker", "ps"]
    assert status.processes() == "2 workers and 2 servers"
