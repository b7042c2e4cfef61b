"""A running job keeps the spec that it started with; what it follows of a changed manifest, and what not."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import msgspec
import pytest

from dlrover.errors import ConfigurationError
from dlrover.kubernetes.machine import nodes, record
from dlrover.kubernetes.machine.decisions import Decision, status_of
from dlrover.kubernetes.operator import apply
from dlrover.kubernetes.platform.job import VARIABLE, read, request
from dlrover.kubernetes.resources import names
from dlrover.kubernetes.resources.types import ElasticJobStatus
from dlrover.spec.node import LaunchNode
from tests.kubernetes.manifests import CONTAINER, job
from tests.kubernetes.world import World, running


def change(world: World, **fields: Any) -> None:
    """Change the role worker of a job's manifest."""
    assert world.job is not None
    world.job["metadata"]["generation"] += 1
    world.job["spec"]["replicaSpecs"]["worker"] |= fields
    world.settle()


def template(**container: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{**copy.deepcopy(CONTAINER), **container}]}}


def pod_of(world: World) -> dict[str, Any]:
    """A worker's pod as the job's next master makes it."""
    assert world.job is not None
    return nodes.pod(record.resolve(world.job).job, LaunchNode(7, 1), "master:1")


def message(world: World, kind: str) -> str:
    return str(next(c["message"] for c in world.status["conditions"] if c["type"] == kind))


def test_a_job_that_has_ended_promises_no_other_start() -> None:
    world = running()
    assert world.master is not None
    world.end(world.master, 1)
    world.settle()
    change(world, template=template(image="train:2"))
    assert message(world, "Applied").endswith(
        "image changed: the job has ended. To run with the change, delete the job and create it again."
    )
    assert world.events.count("NotApplied") == 1
    assert world.job is not None
    world.job["spec"]["replicaSpecs"]["worker"]["replicas"] = 0
    rejected = world.step().events[0]
    assert rejected.reason == "Rejected"
    assert rejected.message.endswith("The job has ended.")
    world.job["spec"] |= {"suspend": True}
    world.settle()
    world.job["spec"] |= {"suspend": False}
    world.settle()
    assert world.status["phase"] == "Failed"


def test_no_replicas_leave_a_running_job_and_its_next_master_as_they_are() -> None:
    world = running()
    change(world, replicas=0)
    assert world.status["phase"] == "Running"
    assert world.status["workers"] == "2/2"
    assert world.condition("Accepted") == "False"
    assert world.events.count("Rejected") == 1
    assert world.status["message"] == (
        "spec.replicaSpecs is worker with 0 replicas: accepted is at least one pod that trains (spec.suspend "
        "stops a job). The job continues unchanged."
    )
    assert world.master is not None
    world.end(world.master, 137)
    world.settle()
    assert world.status["master"]["starts"] == 2, "a wrong manifest does not keep the master away"
    assert world.job is not None
    assert request(record.resolve(world.job).job).job.managed_nodes == 2
    change(world, replicas=3)
    assert world.condition("Accepted") == "True"
    assert request(record.resolve(world.job).job).job.managed_nodes == 3


def test_a_job_that_is_made_without_a_pod_is_rejected() -> None:
    manifest = job()
    manifest["spec"]["replicaSpecs"]["worker"]["replicas"] = 0
    world = World(manifest)
    world.settle()
    assert world.status["phase"] == "Rejected"
    assert "worker with 0 replicas" in world.status["message"]
    assert world.objects == {}


@pytest.mark.parametrize(
    ("number", "unit", "follows"), [(4, "", True), (3, "2", False), (4, "2", True), (0, "", False)]
)
def test_a_number_that_a_running_job_refuses_is_not_its_next_masters(
    number: int, unit: str, follows: bool
) -> None:
    manifest = job()
    manifest["spec"]["replicaSpecs"]["chief"] = {"replicas": 2, "template": template()}
    worker = manifest["spec"]["replicaSpecs"]["worker"]
    worker["template"] = template(
        command=["dlrover-run", *([f"--node-unit={unit}"] if unit else [])]
    )
    world = running(**manifest["spec"])
    change(world, replicas=number)
    assert world.job is not None
    assert record.resolve(world.job).job.spec.replica_specs["worker"].replicas == (
        number if follows else 2
    )
    assert world.condition("Applied") == str(follows)
    if not follows:
        assert message(world, "Applied").startswith("spec.replicaSpecs.worker.replicas changed")


def test_a_changed_image_waits_until_the_job_starts_again() -> None:
    world = running()
    assert world.condition("Applied") == "True"
    change(world, template=template(image="train:2"))
    assert world.condition("Applied") == "False"
    assert message(world, "Applied") == (
        "spec.replicaSpecs.worker.template.spec.containers[0].image changed: a running job keeps "
        "the spec that it started with. To apply the change, set spec.suspend to true, then to false."
    )
    assert world.events.count("NotApplied") == 1
    assert pod_of(world)["spec"]["containers"][0]["image"] == "train:1"
    assert world.job is not None
    for suspend in (True, False):
        world.job["spec"]["suspend"] = suspend
        world.settle()
        for pod in list(world.pods) if suspend else ():
            if pod["metadata"]["name"] == names.master_name("digits"):
                world.gone(pod)
                world.settle()
        for pod in list(world.pods) if suspend else ():
            world.gone(pod)
            world.settle()
    assert world.condition("Applied") == "True"
    assert pod_of(world)["spec"]["containers"][0]["image"] == "train:2"


def test_a_lost_master_is_made_again_as_it_was() -> None:
    world = running()
    assert world.job is not None
    world.job["spec"]["master"] = {"image": "another:1"}
    world.job["metadata"]["generation"] = 2
    world.settle()
    assert message(world, "Applied").startswith("spec.master.image changed")
    assert world.master is not None
    world.end(world.master, 137)
    world.settle()
    assert world.master is not None
    assert world.master["spec"]["containers"][0]["image"] == "dlrover:1"


def test_what_a_running_job_follows_is_no_change_that_waits() -> None:
    world = running()
    assert world.job is not None
    world.job["spec"] |= {"ttlSecondsAfterFinished": 7, "cleanPodPolicy": "All"}
    change(world, replicas=1, minReplicas=1)
    assert world.condition("Applied") == "True"
    found = record.resolve(world.job).job.spec
    assert (found.ttl_seconds_after_finished, found.clean_pod_policy) == (7, "All")
    assert found.replica_specs["worker"].min_replicas == 1


def test_a_job_of_an_earlier_release_is_recorded_as_it_is_found() -> None:
    world = running()
    del world.status["runningSpec"]
    world.settle()
    assert world.status["runningSpec"]
    assert world.events.count("MasterStarted") == 1


def test_a_template_that_was_refused_before_any_pod_was_made_may_be_changed() -> None:
    manifest = job()
    world = World(manifest)
    assert world.job is not None
    world.job["status"] = {
        "phase": "Pending",
        "message": "The API server refuses what the job needs.",
    }
    change(world, template=template(image="train:2"))
    assert pod_of(world)["spec"]["containers"][0]["image"] == "train:2"


def test_a_record_that_cannot_be_read_is_none() -> None:
    manifest = job()
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    for text in ("{", "[]", '{"replicaSpecs": {}}', deep):
        manifest["status"] = {"runningSpec": text}
        assert record.resolve(manifest).job.spec.replica_specs["worker"].replicas == 2
    manifest["spec"] = {}
    with pytest.raises(ConfigurationError):
        record.resolve(manifest)


def test_a_status_that_was_meant_for_an_earlier_job_of_the_name_is_none() -> None:
    class Server:
        def __init__(self) -> None:
            self.patches: list[dict[str, Any]] = []

        async def patch(self, *call: Any, **_more: Any) -> None:
            self.patches.append(call[3]["status"])

        async def create(self, *_: object) -> None:
            pass

    first = job()
    first["metadata"] |= {"uid": "first"}
    for phase in ("Created", "Failed"):
        server: Any = Server()
        done = ElasticJobStatus(phase=phase, completion_time="2026-11-22T17:00:00Z")
        spec = '{"replicaSpecs":{}}'
        decision = Decision(status=msgspec.structs.replace(done, running_spec=spec))
        asyncio.run(apply.carry_out(server, first, decision))
        (patch,) = server.patches
        first["status"] = patch
        second = {**first, "metadata": {**first["metadata"], "uid": "second"}}
        assert status_of(first).phase == phase
        assert status_of(second) == ElasticJobStatus()


def test_a_next_master_counts_the_restarts_on() -> None:
    class Server:
        async def find(self, _resource: object, _namespace: str, _name: str) -> dict[str, Any]:
            return {**job(), "status": {"training": {"restarts": 4}}}

    client: Any = Server()
    found = asyncio.run(read(client, {VARIABLE: "default/digits"}))
    assert request(found).job.earlier_restarts == 4


def test_a_job_that_is_resumed_while_its_pods_end_starts_anew_when_they_have_gone() -> None:
    world = running()
    assert world.job is not None
    old, workers = world.master, world.workers
    world.job["spec"]["suspend"] = True
    change(world, template=template(image="new:2"))
    assert world.condition("Suspended") == "False", (
        "who waits for it may change the manifest too early"
    )
    assert world.condition("Applied") == "False"
    world.job["spec"]["suspend"] = False
    world.settle()
    assert old is not None
    world.gone(old)
    world.settle()
    assert world.master is None, "it would adopt pods of the old manifest"
    for pod in workers:
        assert "deletionTimestamp" in pod["metadata"]
        world.gone(pod)
    world.settle()
    assert world.master is not None
    assert world.condition("Applied") == "True"
    assert pod_of(world)["spec"]["containers"][0]["image"] == "new:2"
    assert world.events.count("Suspended") == world.events.count("Resumed") == 1


# ---- suspending a job whose manifest is wrong


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("wrong", [{"replicas": 0}, {"replicas": "many"}, {"template": 5}])
def test_a_job_whose_manifest_is_wrong_can_be_suspended(
    wrong: dict[str, Any], recorded: bool
) -> None:
    world = running()
    assert world.job is not None
    if not recorded:  # as of an earlier release
        del world.status["runningSpec"]
    world.job["spec"]["replicaSpecs"]["worker"] |= wrong
    world.job["spec"]["suspend"] = True
    world.settle()
    assert world.master is not None
    assert "deletionTimestamp" in world.master["metadata"], "the master goes first"
    world.gone(world.master)
    world.settle()
    for worker in world.workers:
        assert "deletionTimestamp" in worker["metadata"]
        world.gone(worker)
    world.settle()
    assert world.pods == []
    assert world.status["phase"] == "Suspended"
    assert world.condition("Suspended") == "True"
    assert world.condition("Accepted") == "False"
    assert "continues" not in world.status["message"]
    world.job["spec"]["suspend"] = False
    world.settle()
    assert world.pods == [], "nothing is started by a wrong manifest"


def test_a_master_that_is_lost_with_its_machine_is_no_obstacle_to_suspending_a_wrong_job() -> None:
    world = running()
    assert world.job is not None
    del world.status["runningSpec"]
    change(world, replicas=0)
    world.job["spec"]["suspend"] = True
    world.settle()
    world.now += 61.0
    world.settle()
    assert world.master is None
    assert world.events.count("MasterForced") == 1


def test_of_a_wrong_manifest_a_running_job_follows_what_is_right_and_live() -> None:
    world = running()
    assert world.job is not None
    world.job["spec"] |= {"cleanPodPolicy": "All", "ttlSecondsAfterFinished": "soon"}
    change(world, replicas=0)
    spec = record.resolve(world.job).job.spec
    assert (spec.clean_pod_policy, spec.ttl_seconds_after_finished) == ("All", None)
    assert spec.replica_specs["worker"].replicas == 2
    world.job["spec"] |= {"activeDeadlineSeconds": 10}
    world.settle()
    assert world.status["phase"] == "Failed"
