"""What the page of a cluster's job tells without its master: its end, its logs, and the list of jobs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dlrover.dashboard import cluster, ended, podlogs
from dlrover.dashboard.listing import MOST
from dlrover.dashboard.podlogs import PodLog
from dlrover.errors import ExitCode
from dlrover.kubernetes.machine.nodes import NODE_LABEL, RANK_LABEL
from dlrover.kubernetes.resources import names
from dlrover.spec.brain import Description, JobRow, PlanRecord, Sample, Shape, Story
from dlrover.spec.failure import Failure, FailureKind, Origin, Verdict
from dlrover.spec.outcome import Goodput, IncidentCost, Outcome
from dlrover.spec.plan import Effect, NodeGroup, ResourcePlan

MESSAGE = "The training program failed: rank 1: ValueError"


def elastic_job(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "bert",
            "namespace": "nlp",
            "uid": "u",
            "creationTimestamp": "2026-11-21T08:00:00Z",
        },
        "spec": {
            "replicaSpecs": {"worker": {"replicas": 2}, "dlrover-master": {}},
            "master": {"journalClaim": "journals"},
        },
        "status": status,
    }


FAILED = elastic_job(
    phase="Failed",
    message="The manifest is wrong.",
    runningSpec='{"replicaSpecs": {"worker": {"replicas": 3}}}',
    startTime="2026-11-21T08:01:00Z",
    completionTime="2026-11-21T09:01:00Z",
    conditions=[{"type": "Failed", "status": "True", "reason": "NoProgress", "message": MESSAGE}],
    training={"steps": 70, "restarts": 3, "goodput": "62.5%"},
)


def test_an_ended_jobs_page_is_what_its_status_keeps() -> None:
    job = cluster.ended_job(FAILED)
    assert job is not None
    parts = ended.of_elastic_job(job, more="the Brain is away")
    status, goodput = parts["status"], parts["report"]["goodput"]
    assert (status["phase"], status["processes"], status["seconds"]) == (
        "failed",
        "3 workers",
        3600.0,
    )
    assert (status["total_steps"], status["restarts"]) == (70, 3)
    assert status["outcome"]["exit_code"] == ExitCode.NO_PROGRESS
    assert status["outcome"]["reason"] == MESSAGE
    assert status["outcome"]["advice"] == ended.ADVICE
    assert (goodput["ratio"], goodput["words"]) == (0.625, "62.5 %")
    assert "is in the volume claim journals" in parts["known"]["text"]
    assert parts["known"]["text"].endswith("; the Brain is away.")
    msgspec.json.encode(parts)
    assert cluster.ended_job(elastic_job(phase="Running", startTime="2026-11-21T08:01:00Z")) is None


FAILURE = Failure(
    id="1",
    kind=FailureKind.EXCEPTION,
    node_id=0,
    rank=1,
    local_rank=1,
    round=2,
    time=5.0,
    hostname="pod",
    exit_code=1,
    traceback="ValueError: <b>",
)
VERDICT = Verdict(
    title="rank 1: ValueError",
    origin=Origin("user code"),
    cause="exception",
    evidence="ValueError",
    advice="Correct the program.",
)


def incident(round_: int) -> IncidentCost:
    return IncidentCost(
        since=1.0, until=2.0, over=True, title="t", node=0, round=round_, seconds={}, steps_lost=0
    )


def story(**more: Any) -> Story:
    shape = Shape(groups={"worker": NodeGroup(count=2)})
    row = JobRow(
        job="bert-1", description=Description(name="bert"), state="failed", registered=100.0,
        ended=160.0, shape=shape, throughput=55.0,
    )  # fmt: skip
    effect = Effect(throughput=100.0, low=80.0, high=120.0)
    plan = PlanRecord(
        plan_id="p", at=120.0, optimizer="single-job", before=shape, state="applied", measured=110.0,
        plan=ResourcePlan(groups={"worker": NodeGroup(count=4)}, reason="pays", effect=effect), error=0.1, within=True,
    )  # fmt: skip
    return Story(
        job=row,
        plans=(plan,),
        nodes=(),
        samples=(Sample(shape=shape, throughput=55.0, at=150.0),),
        **more,
    )


def test_the_brain_adds_plans_goodput_and_the_root_cause() -> None:
    goodput = Goodput(
        goodput_ratio=0.5, wall_seconds=10.0, job_seconds=5.0, nodes=2, seconds={"productive": 5.0},
        incidents=(incident(1), incident(2)),
    )  # fmt: skip
    outcome = Outcome(
        exit_code=1, reason="r", failure=FAILURE, verdict=VERDICT, goodput=goodput, steps=9
    )
    job = cluster.ended_job(FAILED)
    assert job is not None
    parts = ended.of_elastic_job(job, story(outcome=outcome))
    report = parts["report"]
    assert report["goodput"]["words"] == "50.0 %"
    first, last = report["incidents"]
    assert "root" not in first
    assert (last["root"]["title"], last["root"]["detail"]) == (VERDICT.title, FAILURE.traceback)
    assert parts["status"]["outcome"]["advice"] == VERDICT.advice
    assert parts["status"]["outcome"]["reason"] == MESSAGE
    (plan,) = report["plans"]
    assert (plan["before"], plan["nodes"], plan["measured"], plan["outcome"]) == (
        2,
        4,
        110.0,
        "kept",
    )
    assert report["facts"] == [("Throughput", "55 samples/s", "measured last")]
    assert "the rest is from the Brain's history" in parts["known"]["text"]
    msgspec.json.encode(parts)


def test_a_job_that_only_the_brain_knows_may_still_run() -> None:
    over = ended.of_story(story())
    assert (over["status"]["phase"], over["status"]["seconds"]) == ("failed", 60.0)
    assert over["status"]["outcome"]["reason"] == "The job has failed."
    assert "goodput, incidents, events" in over["known"]["text"]
    row = msgspec.structs.replace(story().job, state="running", ended=None)
    running = ended.of_story(msgspec.structs.replace(story(), job=row))
    assert running["status"].get("outcome") is None
    assert running["status"]["seconds"] == 50.0


def test_of_thousands_of_jobs_those_that_run_are_listed_and_the_latest() -> None:
    rows = [{"name": n, "began": float(n), "over": n != 3} for n in range(3000)]
    found = [row["name"] for row in cluster.latest(rows, MOST)]
    assert len(found) == MOST
    assert found == [*range(2999, 2999 - MOST + 1, -1), 3]
    assert cluster.latest(rows[:2], MOST) == [rows[1], rows[0]]


def pod(name: str, phase: str, node: int = -1, *containers: str) -> dict[str, Any]:
    labels = {
        names.JOB_LABEL: "bert",
        names.ROLE_LABEL: "worker" if node >= 0 else "dlrover-master",
    }
    if node >= 0:
        labels |= {NODE_LABEL: str(node), RANK_LABEL: str(10 - node)}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [{"name": one} for one in containers or ("main",)]},
        "status": {"phase": phase},
    }


def test_the_logs_of_pods_have_names_by_which_they_are_found() -> None:
    found = podlogs.listed(
        [
            pod("m", "Running"),
            pod("w-0", "Failed", 0),
            pod("w-1", "Running", 1, "proxy", "main"),
            pod("w-2", "Running", 2),
        ]
    )
    assert [(row["name"], row["note"]) for row in found] == [
        ("pods/w-2", "worker, running"),
        ("pods/w-2/agent-2.log", "its agent"),
        ("pods/w-1", "worker, running"),
        ("pods/w-1/proxy", "worker, running, container proxy"),
        ("pods/w-1/agent-1.log", "its agent"),
        ("pods/m", "dlrover-master, running"),
        ("pods/w-0", "worker, failed"),
    ]
    stranger = pod("x", "Running", 3)
    del stranger["metadata"]["labels"][RANK_LABEL]
    assert podlogs.listed([stranger, pod("m", "Running")])[0]["name"] == "pods/m"
    assert PodLog.parse("pods/w-1/proxy") == PodLog("w-1", "proxy")
    assert PodLog.parse("pods/w-1/agent-1.log") == PodLog("w-1", "", "agent-1.log")


@pytest.mark.parametrize(
    "name",
    ["master.log", "", "pods/", "pods/../x", "pods/w-1/../x", "pods/W?x=1", "pods/a%2f", "pods/a\n"],
)  # fmt: skip
def test_other_names_are_no_logs_of_pods(name: str) -> None:
    assert PodLog.parse(name) is None
