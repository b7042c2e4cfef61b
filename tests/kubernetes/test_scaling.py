"""A running job on a real control plane gets more pods and fewer: by its replicas, and by ScalePlans."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from dlrover.errors import ConfigurationError
from dlrover.kubernetes.api.client import Client
from dlrover.kubernetes.machine import nodes, scaleplans
from dlrover.kubernetes.platform.scaling import Scaler
from dlrover.kubernetes.resources import names, validation
from dlrover.kubernetes.resources.types import PlannedPod, ScalePlanSpec, ScaleReplica
from dlrover.master import platformside
from dlrover.master.machine import inputs
from dlrover.rpc.messages import ScaleReply
from dlrover.spec.node import FIRST_SERVER, LaunchNode
from tests.kubernetes import manifests
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import Cluster
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.test_job import Job
from tests.support.drivers import JobDriver

SCRIPT = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
with open(folder / "worlds", "a") as worlds:
    worlds.write(os.environ["WORLD_SIZE"] + os.environ["RANK"] + "\\n")
while not (folder / "go").exists():
    time.sleep(0.05)
"""


class Scaled(Job):
    """A job whose workers wait, and note the world that they are in."""

    def __init__(self, cluster: Cluster, kubelet: Kubelet, folder: Path) -> None:
        super().__init__(cluster, kubelet, folder)
        self.script.write_text(SCRIPT)

    def worlds(self) -> list[str]:
        """The size of each world whose first rank has begun."""
        path = self.folder / "worlds"
        lines = path.read_text().split() if path.exists() else []
        return [line[:-1] for line in lines if line.endswith("0")]

    def scale(self, replicas: int) -> None:
        """What ``kubectl scale`` does."""
        patch = {"spec": {"replicas": replicas}}
        self.cluster.plane.call("PATCH", self.cluster.path("elasticjobs", "digits/scale"), patch)

    def plan(self, name: str, labels: dict[str, str] | None = None, **spec: Any) -> None:
        metadata = {"name": name, "labels": labels or {"scale-type": "manual"}}
        self.cluster.create(
            {
                "apiVersion": names.API_VERSION,
                "kind": "ScalePlan",
                "metadata": metadata,
                "spec": {"ownerJob": "digits", **spec},
            }
        )

    def told_of(self, name: str) -> tuple[str, str]:
        """A plan's phase and message."""
        path = self.cluster.path("elasticjobs").replace("elasticjobs", "scaleplans")
        status = self.cluster.plane.call("GET", f"{path}/{name}").get("status", {})
        return status.get("phase", ""), status.get("message", "")

    def events(self, reason: str) -> list[str]:
        """What the master told with a reason."""
        return [
            event["message"]
            for event in self.cluster.list("events")
            if event["source"].get("component") == "dlrover-master" and event["reason"] == reason
        ]

    async def ends(self, name: str) -> tuple[str, str]:
        await self.until(lambda: self.told_of(name)[0] in ("Succeeded", "Failed"))
        return self.told_of(name)


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path, kubelet: Callable[..., Kubelet]) -> Scaled:
    return Scaled(cluster, kubelet(nodes=2), tmp_path)


TWO = {"replicaResourceSpecs": {"worker": {"replicas": 2}}}


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_job_follows_its_replicas_and_its_plans(job: Scaled) -> None:
    async def story() -> None:
        async with job.cluster.operator():
            job.submit(2)
            await job.until(lambda: job.worlds() == ["2"])
            await follow_replicas(job)
            await carry_out_a_plan(job)
            await refuse_wrong_plans(job)
            (job.folder / "go").touch()
            await job.until(lambda: job.cluster.status.get("phase") == "Succeeded")
            job.plan("late", **TWO)
            assert await job.ends("late") == ("Failed", "The ElasticJob digits has ended.")
            assert job.cluster.status["training"]["restarts"] == 0

    asyncio.run(story())


async def follow_replicas(job: Scaled) -> None:
    """Up, and down while its master is replaced, which learns from the nodes what runs."""
    job.scale(3)
    await job.until(lambda: job.worlds() == ["2", "3"])
    (told,) = job.events("Scaled")
    assert told.startswith("The job will have 3 nodes instead of 2: 1 is being started")
    job.delete(names.master_name("digits"))
    await job.until(lambda: job.cluster.told.get("MasterReady") == 2)
    job.scale(1)
    await job.until(lambda: job.worlds() == ["2", "3", "1"])
    assert job.workers() == ["digits-edljob-worker-0"]


async def carry_out_a_plan(job: Scaled) -> None:
    job.plan("grow", psHosts=["ps-0:1"], manualScaling=True, **TWO)
    assert await job.ends("grow") == ("Succeeded", "The job has 2 workers.")
    assert job.worlds()[3:] == ["2"]
    spec = job.cluster.get("elasticjobs", "digits")["spec"]
    assert spec["replicaSpecs"]["worker"]["replicas"] == 2, "a next master reads it there"
    said = " ".join(job.events("NoEffect"))
    assert "spec.psHosts is accepted for compatibility and has no effect" in said
    assert "spec.manualScaling is accepted for compatibility and has no effect" in said


async def refuse_wrong_plans(job: Scaled) -> None:
    """Each with a sentence; what another job's is, is left alone."""
    job.plan("servers", replicaResourceSpecs={"ps": {"replicas": 2}})
    assert await job.ends("servers") == (
        "Failed",
        "spec.replicaResourceSpecs.ps.replicas: the job has no role ps; it has worker.",
    )
    job.plan("nothing", removePods=[{"name": "a"}, {"name": "b"}])
    phase, message = await job.ends("nothing")
    assert phase == "Failed"
    assert message.startswith("The plan requests 0 workers: accepted are at least 1 ")
    job.plan("auto", {"scale-type": "auto"}, createPods=[{}], reason="The queue is long.")
    phase, message = await job.ends("auto")
    assert phase == "Failed"
    assert message.startswith("A user has set the number of nodes to 2")
    job.scale(0)
    refusal = "spec.replicaSpecs is worker with 0 replicas"
    await job.until(lambda: refusal in job.cluster.status["message"])
    assert job.cluster.told["Rejected"] == 1
    assert job.cluster.status["phase"] == "Running"
    job.scale(2)
    job.plan("other", ownerJob="letters")
    await job.until(lambda: job.told_of("other")[0] == "Pending")
    assert job.told_of("other")[1] == (
        "There is no ElasticJob letters in this namespace; create the plan after its job."
    )
    assert job.events("ScaleFailed"), "it is told with the job, too"


# ---- plans that the master makes


def test_a_plan_of_the_masters_own_is_recorded_with_its_reason(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    cluster = Cluster(control_plane, namespace, tmp_path)
    worker = {**manifests.job()["spec"]["replicaSpecs"]["worker"], "replicas": 4, "minReplicas": 2}
    cluster.create(
        {**manifests.job(replicaSpecs={"worker": worker}), "metadata": {"name": "digits"}}
    )
    driver = JobDriver.launched(2, 4)
    sizes: list[tuple[str, int]] = []

    def ask(
        number: int,
        reason: str,
        source: Literal["user", "plan"],
        role: str,
        factors: tuple[float, float],
    ) -> ScaleReply:
        before = driver.machine.scaling.workers
        driver.give(inputs.ScaleRequested(number, reason, source, role, factors))
        return platformside.reply(before, driver.machine.scaling.workers)

    def resize(role: str, replicas: int) -> None:
        sizes.append((role, replicas))

    def plan() -> dict[str, Any]:
        path = cluster.path("elasticjobs").replace("elasticjobs", "scaleplans")
        plans = cluster.plane.call("GET", path)["items"]
        return dict(plans[0]) if plans else {}

    async def story() -> None:
        client = Client.from_config(str(control_plane.kubeconfig))
        found = validation.parse(cluster.get("elasticjobs", "digits"))
        size = functools.partial(platformside.size, driver.machine, 0.0)
        calls: Any = SimpleNamespace(
            size=size,
            ask_scale=ask,
            placed=dict,
            ask_migrate=lambda *_: "no pod is replaced here",
        )
        scaling = asyncio.create_task(Scaler(client, found, calls, resize).run())
        try:
            await cluster.until(lambda: sizes == [("worker", 4)])
            driver.give(inputs.ScaleRequested(3, "The fourth adds nothing.", "plan"))
            await cluster.until(lambda: plan().get("status", {}).get("phase") == "Scaling")
            driver.give(inputs.NodeExited(3, "its agent ended"))
            driver.join(0, 1, 2)
            await cluster.until(lambda: plan()["status"]["phase"] == "Succeeded")
        finally:
            scaling.cancel()
            await asyncio.wait([scaling])
            await client.close()

    asyncio.run(story())
    made = plan()
    assert made["metadata"]["labels"]["scale-type"] == "auto"
    assert made["spec"]["replicaResourceSpecs"] == {"worker": {"replicas": 3}}
    assert made["status"]["message"] == "The fourth adds nothing. The job has 3 workers."
    assert made["status"]["finishTime"] >= made["status"]["createTime"]
    assert set(sizes) == {("worker", 4), ("worker", 3)}
    spec = cluster.get("elasticjobs", "digits")["spec"]
    assert spec["replicaSpecs"]["worker"]["replicas"] == 4, "the user's number stays"


# ---- what a plan asks for

BOTH = {
    "worker": {
        **manifests.job()["spec"]["replicaSpecs"]["worker"],
        "replicas": 4,
        "minReplicas": 2,
    },
    "evaluator": {**manifests.job()["spec"]["replicaSpecs"]["worker"], "replicas": 1},
    "ps": {**manifests.job()["spec"]["replicaSpecs"]["worker"], "replicas": 3},
}
JOB = validation.parse(manifests.job(replicaSpecs=BOTH))


def replicas(**numbers: int | None) -> dict[str, ScaleReplica]:
    return {role: ScaleReplica(replicas=number) for role, number in numbers.items()}


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        ({"replica_resource_specs": replicas(worker=7)}, {"worker": 7}),
        ({"replica_resource_specs": replicas(worker=7, ps=2)}, {"worker": 7, "ps": 2}),
        ({"replica_resource_specs": replicas(PS=5)}, {"ps": 5}),
        ({"replica_resource_specs": replicas(worker=None)}, {"worker": 4}),
        ({"create_pods": [PlannedPod(), PlannedPod(type="worker")]}, {"worker": 6}),
        ({"remove_pods": [PlannedPod(name="digits-edljob-worker-3")]}, {"worker": 3}),
        ({"create_pods": [PlannedPod()], "remove_pods": [PlannedPod()]}, {"worker": 4}),
        ({"remove_pods": [PlannedPod(type="ps")]}, {"ps": 2}),
        ({}, {"worker": 4}),
    ],
)
def test_how_many_pods_a_plan_asks_for(spec: dict[str, Any], numbers: dict[str, int]) -> None:
    plan = ScalePlanSpec(owner_job="digits", **spec)
    assert scaleplans.wanted(plan, JOB, {"worker": 4, "ps": 3}) == numbers


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (
            {"replica_resource_specs": replicas(chief=1)},
            "the job has no role chief; it has worker, evaluator, ps",
        ),
        (
            {"replica_resource_specs": replicas(evaluator=2)},
            "replicas is 2: accepted is 1, the number that",
        ),
        ({"replica_resource_specs": replicas(worker=1)}, "at least 2 (minReplicas)"),
        ({"create_pods": [PlannedPod(type="chief")]}, "of type chief: accepted are worker and ps"),
        ({"remove_pods": [PlannedPod()] * 4}, "requests 0 workers"),
        (
            {"replica_resource_specs": replicas(worker=4, ps=0)},
            "requests 0 servers: accepted are at least 1",
        ),
    ],
)
def test_a_wrong_plan_gets_a_sentence(spec: dict[str, Any], why: str) -> None:
    plan = ScalePlanSpec(owner_job="digits", **spec)
    with pytest.raises(ConfigurationError) as caught:
        scaleplans.wanted(plan, JOB, {"worker": 4, "ps": 3})
    assert why in str(caught.value)
    assert str(caught.value).endswith(".")


def test_the_ranks_of_other_roles_stay_where_they_are_when_workers_come_and_go() -> None:
    def pods(job: Any) -> list[str]:
        ranks = [0, 1, 4, 9, FIRST_SERVER, FIRST_SERVER + 7]
        return [nodes.pod_name(job, LaunchNode(i, rank)) for i, rank in enumerate(ranks)]

    assert pods(nodes.resized(JOB, "worker", 9)) == pods(JOB) == pods(nodes.resized(JOB, "ps", 9))
    assert pods(JOB) == [
        f"digits-edljob-{role}-{i}"
        for i, role in enumerate(["evaluator", "worker", "worker", "worker", "ps", "ps"])
    ]


# ---- what the operator says of plans


@pytest.mark.parametrize(
    ("before", "job", "phase"),
    [
        ({}, manifests.job(), "Pending"),
        ({"phase": "Pending"}, manifests.job(suspend=True), "Pending"),
        ({"phase": "Scaling"}, manifests.job(), None),
        ({"phase": "Scaling"}, None, "Failed"),
        ({"phase": "Failed"}, None, None),
        ({}, None, "Pending"),
        ({}, manifests.job(managedBy="another"), None),
        ({"phase": "Scaling"}, {**manifests.job(), "status": {"completionTime": "2026-01-01"}}, "Failed"),
    ],
)  # fmt: skip
def test_what_the_operator_says_of_a_plan(
    before: dict[str, str], job: dict[str, Any] | None, phase: str | None
) -> None:
    plan = {"metadata": {}, "spec": {"ownerJob": "digits"}, "status": before}
    status = scaleplans.standing(plan, job)
    assert (status["phase"] if status else None) == phase


def test_a_plan_that_waits_for_a_right_manifest_says_so() -> None:
    plan = {"metadata": {}, "spec": {"ownerJob": "digits"}}
    job = manifests.job()
    assert scaleplans.standing(plan, job) == {
        "phase": "Pending",
        "message": "The plan waits for the master of digits.",
    }
    job["spec"]["replicaSpecs"]["worker"]["replicas"] = 0
    status = scaleplans.standing(plan, job)
    assert status is not None
    assert status["message"].startswith(
        "The plan waits until the manifest of digits is right: spec.replicaSpecs is worker with 0 replicas"
    )
