"""Jobs that find their size by themselves, with real processes on this machine."""

import json

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events
from dlrover.spec.job import Limits

pytest.importorskip("scipy")

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(150)]

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


@pytest.mark.parametrize("law", [SCALES, TWO_PAY], ids=["four pay", "two pay"])
def test_a_job_reaches_the_best_size_from_one_worker(run, law) -> None:
    out = run.directory / "out"
    out.mkdir()
    launch = run(
        *("--nnodes=1:4", "--local-nodes=1", "--auto-scale", "--rdzv-conf=autoscale_window=2"),
        *(run.scripts / "law.py", out, ",".join(map(str, law))),
    )
    launch.until(lambda: of_kind(launch, events.SizeSettled), 120, "a size that is settled")
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
    run.dlrover("stop", "--job-dir", launch.job_dir)
    launch.end_with(ExitCode.STOPPED)
