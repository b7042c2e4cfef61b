"""Jobs with parameter servers that find their size, and relieve a hot server: the example, with real processes."""

import json
import re
from pathlib import Path

import pytest

from dlrover.errors import ConfigurationError, ExitCode
from dlrover.platform import groups
from dlrover.spec import events
from dlrover.spec.job import Limits
from dlrover.spec.node import Size
from dlrover.spec.plan import ScaleKind

pytest.importorskip("scipy")

pytestmark = [
    pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.heavy, pytest.mark.timeout(280)
]  # fmt: skip

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_parameter_server" / "train.py"
COMPUTE = 0.03
"""Seconds that a worker idles in a step."""
ROW = 0.00005
"""Seconds that a server idles for a row."""
ROWS = 1450
"""Rows that a step pulls and pushes."""
SIZES = [Size(workers, servers) for workers in (1, 2, 3) for servers in (1, 2)]
WITHIN = 0.85
"""Share of the best size's worth that is to be reached."""


def worth(size: Size) -> float:
    """By mean value analysis: workers idle, then wait for each server in turn."""
    waiting, each = [0.0] * size.servers, ROW * ROWS / size.servers
    rate = 0.0
    for workers in range(1, size.workers + 1):
        times = [each * (1 + queued) for queued in waiting]
        rate = workers / (COMPUTE + sum(times))
        waiting = [rate * time for time in times]
    return rate / size.nodes ** Limits().autoscale_cost


def of_kind(launch, kind: type) -> list:
    return [event.body for event in launch.events_of(kind)]


def shares(launch) -> list[int]:
    """Of each server of the rows, in percent, as rank 0 said last."""
    told = re.findall(r"rows by server: (.*)", launch.stdout)
    return [int(share.strip("%")) for share in told[-1].split()] if told else []


@pytest.fixture
def _allowed() -> None:
    try:
        groups.check()
    except ConfigurationError as error:
        pytest.skip(str(error))


def test_a_job_reaches_the_best_size_from_one_worker_and_one_server(run) -> None:
    conf = "autoscale_window=2,heartbeat_interval=0.5"
    launch = run(
        *("--nnodes=1:3", "--local-nodes=1", "--servers=1:2", "--auto-scale"),
        *(f"--rdzv-conf={conf}", EXAMPLE, "--out", run.directory / "out", "--clicks=1000000"),
        *(f"--step-time={COMPUTE}", f"--row-time={ROW}", "--save-every=20"),
    )
    launch.until(lambda: of_kind(launch, events.SizeSettled), 225, "a size that is settled")
    (settled,) = of_kind(launch, events.SizeSettled)
    found, best = Size(settled.nodes, settled.servers), max(SIZES, key=worth)
    assert worth(found) >= WITHIN * worth(best), (found, best)
    launch.until(
        lambda: len(launch.pids("agent")) == found.nodes, 20, "nodes that are not needed leave"
    )
    shown = run.dlrover("plan", "--job-dir", launch.job_dir, "--output", "json")
    report = json.loads(shown.stdout)
    assert (report["settled"]["nodes"], report["settled"]["servers"]) == found
    assert all(plan["measured"] is not None for plan in report["plans"]), report["plans"]
    run.dlrover("stop", "--job-dir", launch.job_dir)
    launch.end_with(ExitCode.STOPPED)


@pytest.mark.usefixtures("_allowed")
def test_a_server_with_most_of_the_work_is_relieved(run) -> None:
    """The first half of the rows is asked for three times as often as the other one."""
    conf = "autoscale_window=3,heartbeat_interval=0.5,usage_interval=1"
    launch = run(
        *("--nnodes=2", "--local-nodes=2", "--servers=2:3", "--node-cpu=0.4", "--auto-scale"),
        *(f"--rdzv-conf={conf}", EXAMPLE, "--out", run.directory / "out", "--clicks=1000000"),
        *("--step-time=0.03", "--row-work=0.00005", "--save-every=10"),
    )
    launch.until(lambda: max(shares(launch), default=0) > 70, 60, "an uneven load")
    launch.until(lambda: of_kind(launch, events.PlanMade), 60, "a plan")
    plan = of_kind(launch, events.PlanMade)[0]
    if plan.kind is not ScaleKind.MEASURE:  # a busy machine: nobody knew the servers' load in time
        assert plan.kind is ScaleKind.REBALANCE
        assert "times the mean load of the servers" in plan.reason
    launch.until(lambda: max(shares(launch)) < 56, 60, "an even load")
    assert not of_kind(launch, events.RestartDecided)
    run.dlrover("stop", "--job-dir", launch.job_dir)
    launch.end_with(ExitCode.STOPPED)


@pytest.mark.usefixtures("_allowed")
def test_a_server_that_stays_hot_moves_to_more_cores_and_the_job_is_faster(run) -> None:
    """A new round does not help here: the program gives the same server most of the work again."""
    conf = "autoscale_window=3,heartbeat_interval=0.5,usage_interval=1"
    launch = run(
        *("--nnodes=1", "--local-nodes=1", "--servers=2:3", "--node-cpu=0.25", "--auto-scale"),
        *(f"--rdzv-conf={conf}", run.scripts / "hot_server.py"),
    )

    def moved() -> list:
        return [plan for plan in of_kind(launch, events.PlanMade) if plan.kind is ScaleKind.MIGRATE]

    launch.until(moved, 110, "a plan to move the server")
    plan = moved()[0]
    assert plan.reason.startswith("hot: "), plan.reason

    def measured() -> list:
        return [m for m in of_kind(launch, events.PlanMeasured) if m.number == plan.number]

    launch.until(measured, 60, "what the move has brought")
    assert measured()[0].throughput > 1.5 * plan.effect.before
    migrates = of_kind(launch, events.NodeMigrates)[0]
    launched = {node.node: node for node in of_kind(launch, events.NodeLaunched)}
    assert launched[migrates.successor].cpu_factor == 4.0
    assert not of_kind(launch, events.RestartDecided)
    run.dlrover("stop", "--job-dir", launch.job_dir)
    launch.end_with(ExitCode.STOPPED)
