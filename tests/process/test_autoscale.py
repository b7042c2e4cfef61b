"""Jobs that find their size by themselves, with real processes on this machine."""

import json

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events
from dlrover.spec.job import Limits
from dlrover.spec.plan import ScaleKind

pytest.importorskip("scipy")

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(330)]

SCALES = [0.1, 0.11, 0.115, 0.12]
"""Seconds of a step by the number of workers."""
TWO_PAY = [0.1, 0.12, 0.24, 0.36]
WITHIN = 0.85
"""Share of the best size's worth that is to be reached."""


def best_of(law: list[float]) -> int:
    """The best size, by looking at all of them."""
    return max(range(1, len(law) + 1), key=lambda nodes: worth(law, nodes))


def worth(law: list[float], nodes: int) -> float:
    return nodes / law[nodes - 1] / nodes ** Limits().autoscale_cost


def of_kind(launch, kind: type) -> list:
    return [event.body for event in launch.events_of(kind)]


@pytest.mark.parametrize(
    "law",
    [
        pytest.param(SCALES, id="four pay", marks=pytest.mark.heavy),
        pytest.param(TWO_PAY, id="two pay", marks=pytest.mark.heavy),
    ],
)
def test_a_job_reaches_the_best_size_from_one_worker(run, law) -> None:
    out = run.directory / "out"
    out.mkdir()
    launch = run(
        *("--nnodes=1:4", "--local-nodes=1", "--auto-scale", "--rdzv-conf=autoscale_window=2"),
        *(run.scripts / "law.py", out, ",".join(map(str, law))),
    )
    launch.until(lambda: of_kind(launch, events.SizeSettled), 240, "a size that is settled")
    rounds = [body.nodes for body in of_kind(launch, events.RoundCompleted)]
    assert rounds[0] == 1
    assert worth(law, rounds[-1]) >= WITHIN * worth(law, best_of(law)), rounds
    launch.until(
        lambda: len(launch.pids("agent")) == rounds[-1], 20, "nodes that are not needed leave"
    )
    shown = run.dlrover("plan", "--job-dir", launch.job_dir, "--output", "json")
    report = json.loads(shown.stdout)
    assert report["settled"]["nodes"] == rounds[-1]
    for plan in report["plans"]:
        assert plan["measured"] is not None, plan
        assert plan["outcome"] in ("kept", "does not pay")
    assert run.dlrover("stop", "--job-dir", launch.job_dir).returncode == 0
    launch.end_with(ExitCode.STOPPED)


def test_a_slow_worker_gets_another_node(run) -> None:
    """Its rank takes twice as long for a step, and all others wait for it.

    While it does, one node alone would be worth more; but it is the node that is replaced, not the size.
    """
    out = run.directory / "out"
    out.mkdir()
    slow = "slow_rank_window=2,slow_rank_windows=3,heartbeat_interval=0.5"
    conf = f"autoscale_window=2,autoscale_cost=0.2,{slow}"
    launch = run(
        *("--nnodes=1:2", "--local-nodes=2", "--auto-scale", f"--rdzv-conf={conf}"),
        *(run.scripts / "law.py", out, "0.1,0.1"),
    )
    launch.until(lambda: of_kind(launch, events.SizeSettled), 60, "a size that is settled")
    # One node may have been measured on the way there.
    before = len(of_kind(launch, events.PlanMade))
    victim = launch.of_kind("agent")[-1]
    (out / "slow").write_text(str(victim.pid))
    launch.until(lambda: of_kind(launch, events.PlanMade)[before:], 60, "a plan")
    plan = of_kind(launch, events.PlanMade)[before]
    assert plan.kind is ScaleKind.REPLACE

    def measured() -> list[events.PlanMeasured]:
        made = of_kind(launch, events.PlanMeasured)
        return [measured for measured in made if measured.number == plan.number]

    launch.until(measured, 60, "a faster job")
    (measurement,) = measured()
    assert measurement.throughput > max(1.5 * 2 / 0.2, plan.effect.before)
    assert not victim.is_running()
    assert len(launch.pids("agent")) == 2
    assert run.dlrover("stop", "--job-dir", launch.job_dir).returncode == 0
    launch.end_with(ExitCode.STOPPED)
