"""Nodes that are placed all together: groups for other schedulers, and jobs that give way to each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.kubernetes.machine import nodes, objects, podgroups, yielding
from dlrover.kubernetes.machine.yielding import Claim
from dlrover.kubernetes.resources import validation
from dlrover.spec.node import LaunchNode
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import Cluster
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.manifests import job
from tests.kubernetes.world import World

GROUP = "digits-edljob-uid"


def node(manifest: dict[str, Any]) -> dict[str, Any]:
    return nodes.pod(validation.parse(manifest), LaunchNode(0, 0), "m:1")


# ---- other schedulers: the names are those of their documentation, which `podgroups` cites


def test_volcano_gets_a_pod_group_and_an_annotation() -> None:
    manifest = job(gang={"by": "volcano", "queue": "research"})
    manifest["spec"]["replicaSpecs"]["worker"] |= {"replicas": 4, "minReplicas": 3}
    pod = node(manifest)
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == GROUP
    assert pod["spec"]["schedulerName"] == "volcano"
    group = objects.pod_group(validation.parse(manifest))
    assert group is not None
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert (group["kind"], group["metadata"]["name"]) == ("PodGroup", GROUP)
    assert group["spec"] == {"minMember": 3, "queue": "research"}


def test_coscheduling_gets_a_pod_group_and_a_label() -> None:
    manifest = job(gang={"by": "coscheduling"})
    pod = node(manifest)
    assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == GROUP
    assert "schedulerName" not in pod["spec"], "it may be the default one or another"
    group = objects.pod_group(validation.parse(manifest))
    assert group is not None
    assert group["apiVersion"] == "scheduling.x-k8s.io/v1alpha1"
    assert group["spec"] == {"minMember": 2}


def test_koordinator_gets_annotations() -> None:
    manifest = job(gang={"by": "koordinator"})
    pod = node(manifest)
    assert pod["metadata"]["annotations"] == {
        "gang.scheduling.koordinator.sh/name": GROUP,
        "gang.scheduling.koordinator.sh/min-available": "2",
    }
    assert pod["spec"]["schedulerName"] == "koord-scheduler"
    assert objects.pod_group(validation.parse(manifest)) is None


@pytest.mark.parametrize("where", ["field", "label"])
def test_kueue_gets_labels_and_the_number_of_pods(where: str) -> None:
    manifest = job(gang={"by": "kueue", **({"queue": "team"} if where == "field" else {})})
    if where == "label":
        manifest["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    metadata = node(manifest)["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert metadata["labels"]["kueue.x-k8s.io/pod-group-name"] == GROUP
    assert metadata["annotations"] == {"kueue.x-k8s.io/pod-group-total-count": "2"}


def test_the_master_is_in_no_group() -> None:
    for by in ("volcano", "coscheduling", "koordinator", "kueue"):
        pod = str(objects.master_pod(validation.parse(job(gang={"by": by, "queue": "q"})), "i"))
        assert not any(word in pod for word in ("scheduling", "koord", "kueue")), by


def test_a_template_that_names_a_group_itself_keeps_it() -> None:
    manifest = job(gang={"by": "volcano"})
    template = manifest["spec"]["replicaSpecs"]["worker"]["template"]
    template["metadata"] = {"annotations": {"scheduling.k8s.io/group-name": "mine"}}
    template["spec"]["schedulerName"] = "my-volcano"
    pod = node(manifest)
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "mine"
    assert pod["spec"]["schedulerName"] == "my-volcano"


def test_a_job_without_a_gang_has_no_group() -> None:
    assert podgroups.pod_group(validation.parse(job())) is None
    assert "scheduling" not in str(node(job()))


# ---- who gives way


def claim(key: str, **more: Any) -> Claim:
    return Claim(
        **{
            "key": key, "waits": True, "holds": True, "priority": 0, "yields": 0, "created": 0.0,
            "since": 0.0, "yielded": 0.0, **more,
        }
    )  # fmt: skip


def left(own: Claim, *others: Claim, now: float = 100.0) -> float | None:
    return yielding.time_left(own, [own, *others], after=60.0, now=now)


def test_the_youngest_of_the_lowest_priority_gives_way() -> None:
    old, young = claim("a", created=1.0), claim("b", created=2.0)
    assert (left(old, young), left(young, old)) == (None, 0.0)
    urgent = claim("c", created=3.0, priority=7)
    assert (left(urgent, old), left(old, urgent)) == (None, 0.0)


def test_who_gave_way_comes_first_the_next_time() -> None:
    old, young = claim("a", created=1.0), claim("b", created=2.0, yields=1)
    assert (left(old, young), left(young, old)) == (0.0, None)


def test_nobody_gives_way_to_nobody() -> None:
    alone, gone = claim("a"), claim("b", waits=False)
    assert left(alone) is None
    assert left(alone, gone) is None


def test_who_holds_nothing_has_nothing_to_give() -> None:
    first, empty = claim("a", created=1.0), claim("b", created=2.0, holds=False)
    assert (left(first, empty), left(empty, first)) == (None, None)
    holder = claim("c", created=3.0)
    assert left(holder, claim("d", created=1.0, holds=False)) == 0.0


def test_the_time_begins_again_when_one_comes_or_gives_way() -> None:
    first, last = claim("a", created=1.0), claim("b", created=2.0)
    assert left(last, first, now=50.0) == 10.0
    assert left(last, first, claim("c", waits=False, yielded=90.0)) == 50.0
    assert left(last, claim("a", created=1.0, since=70.0)) == 30.0


CLAIMS = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.integers(0, 2), st.integers(0, 2)), max_size=6
)


@settings(max_examples=50)
@given(CLAIMS)
def test_at_most_one_gives_way_and_one_does_where_two_hold_something(
    drawn: list[tuple[bool, bool, int, int]],
) -> None:
    claims = [
        claim(str(index), waits=waits, holds=holds, priority=priority, yields=yields)
        for index, (waits, holds, priority, yields) in enumerate(drawn)
    ]
    yielded = [one for one in claims if left(one, *claims) is not None]
    assert len(yielded) <= 1
    holders = [one for one in claims if one.waits and one.holds]
    if len(holders) >= 2:
        assert yielded == [max(holders, key=lambda one: one.order)]


# ---- a job's decision


def half_placed(after: int = 60) -> World:
    """A job of two nodes of which one has a machine; another job waits before it."""
    world = World(job(gang={"yieldAfterSeconds": after}))
    world.settle()
    assert world.master is not None
    world.run(world.master)
    for index in range(2):
        pod = world.create_worker(index)
        pod["spec"] = {"nodeName": "one"} if index == 0 else {}
    world.rivals = [claim("default/other", priority=1, since=world.now)]
    return world


def test_a_job_gives_its_pods_back_and_asks_again_after_a_while() -> None:
    world = half_placed()
    world.step()
    assert world.decision.again == 60.0
    world.now += 60.0
    world.step()
    assert world.status["phase"] == "Yielded"
    assert "1 of at least 2 nodes were placed while another job waits" in world.status["message"]
    for pod in list(world.pods):
        world.step()
        if pod in world.pods and "deletionTimestamp" in pod["metadata"]:
            world.gone(pod)
    world.settle()
    assert world.pods == []
    assert world.status["yields"] == 1
    assert world.decision.again == 60.0
    world.now += 60.0
    world.settle()
    assert world.master is not None
    assert world.status["master"]["quickEnds"] == 0
    assert world.events.count("Yielded") == 1


def test_finalizers_that_keep_the_pods_of_a_job_that_has_yielded_are_named() -> None:
    world = half_placed()
    world.step()
    assert world.master is not None
    world.master["metadata"]["finalizers"] = ["a.io/one"]
    world.now += 60.0
    world.step()
    world.master["metadata"]["deletionGracePeriodSeconds"] = 0
    world.step()
    (ready,) = [one for one in world.status["conditions"] if one["type"] == "MasterReady"]
    assert ready["message"].endswith("which their controllers have to remove: a.io/one.")
    assert world.events.count("PodHeld") == 1


def test_pods_that_are_prepared_are_looked_at_before_a_job_may_have_to_yield() -> None:
    world = half_placed()
    first = world.pods[1]
    first["status"] |= {"conditions": [{"type": "PodScheduled", "status": "True"}]}
    world.step()
    assert world.decision.again == 15.0
    world.now += 50.0
    world.step()
    assert world.decision.again == 10.0


def test_a_clock_that_was_set_back_keeps_no_job_waiting() -> None:
    world = half_placed()
    world.step()
    world.now -= 7200.0
    world.step()
    assert world.status["phase"] == "Yielded"
    world.now -= 7200.0
    for pod in list(world.pods):
        world.step()
        if pod in world.pods and "deletionTimestamp" in pod["metadata"]:
            world.gone(pod)
    world.settle()
    assert world.master is not None, "it is back at once"


def test_a_job_that_was_placed_once_never_gives_way() -> None:
    world = half_placed()
    world.workers[1]["spec"] = {"nodeName": "two"}
    world.settle()
    assert world.condition("Placed") == "True"
    world.gone(world.workers[1])
    world.now += 1000.0
    world.settle()
    assert world.condition("Placed") == "True"
    assert "Yielded" not in world.events


def test_what_a_job_claims_follows_its_pods() -> None:
    world = half_placed()
    world.workers[0]["spec"]["priority"] = 7
    world.settle()
    own = world.decision.claim
    assert own is not None
    assert (own.key, own.waits, own.holds, own.priority) == ("default/digits", True, True, 7)
    world.workers[1]["spec"] = {"nodeName": "two"}
    world.settle()
    own = world.decision.claim
    assert own is not None
    assert not own.waits
    plain = World()
    plain.settle()
    assert plain.decision.claim is None


def test_a_job_alone_waits_as_long_as_it_takes() -> None:
    world = half_placed()
    world.rivals = []
    world.now += 1000.0
    world.settle()
    assert "Yielded" not in world.events
    assert world.decision.again == 60.0


# ---- with the real scheduler


def manifest(name: str, program: Path) -> dict[str, Any]:
    """A job of two nodes with an accelerator each. Its master may be anywhere."""
    made = job(gang={"yieldAfterSeconds": 10})
    made["metadata"] = {"name": name}
    accelerator = {"nvidia.com/gpu": 1}
    container = {
        "name": "main",
        "image": "train:1",
        "command": ["dlrover-run", "--nnodes=2", str(program)],
        "resources": {"requests": accelerator, "limits": accelerator},
    }
    spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
    made["spec"]["replicaSpecs"]["worker"]["template"] = {"spec": spec}
    anywhere = {"spec": {"tolerations": [{"operator": "Exists"}]}}
    made["spec"]["replicaSpecs"]["dlrover-master"] = {"template": anywhere}
    return made


def test_a_cluster_without_the_scheduler_is_told(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    cluster = Cluster(control_plane, namespace, tmp_path)

    async def scenario() -> None:
        async with cluster.operator():
            made = job(gang={"by": "volcano"})
            made["metadata"] = {"name": "digits"}
            cluster.create(made)
            await cluster.until(lambda: cluster.told.get("Refused") == 1)
            assert "no PodGroup of scheduling.volcano.sh/v1beta1" in cluster.status["message"]
            assert cluster.list("pods") == []

    asyncio.run(scenario())


@pytest.mark.long
@pytest.mark.timeout(180)
def test_of_two_jobs_with_half_of_what_they_need_one_gives_way_and_both_train(
    control_plane: ControlPlane,
    namespace: str,
    tmp_path: Path,
    kubelet: Callable[..., Kubelet],
) -> None:
    cluster = Cluster(control_plane, namespace, tmp_path)
    kubelet(gpu="2")
    machine = f"/api/v1/nodes/{namespace}-0"
    program = tmp_path / "train.py"
    program.write_text("print('trained')\n")

    def status(name: str) -> dict[str, Any]:
        found: dict[str, Any] = cluster.get("elasticjobs", name).get("status", {})
        return found

    def workers() -> set[str]:
        names = {pod["metadata"]["name"] for pod in cluster.list("pods")}
        return {name for name in names if "-edljob-" in name}

    async def until(condition: Callable[[], bool]) -> None:
        late = time.monotonic() + 90.0
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < late, (status("one"), status("two"))
            await asyncio.sleep(0.2)

    async def scenario() -> None:
        async with cluster.operator():
            control_plane.call("PATCH", machine, {"spec": {"unschedulable": True}})
            for name in ("one", "two"):
                cluster.create(manifest(name, program))
            await until(lambda: len(workers()) == 4)
            for name in ("one", "two"):
                path = cluster.path("pods", f"{name}-edljob-worker-0")
                target = {"target": {"kind": "Node", "name": f"{namespace}-0"}}
                metadata = {"metadata": {"name": f"{name}-edljob-worker-0"}}
                control_plane.call("POST", f"{path}/binding", {**target, **metadata})
            control_plane.call("PATCH", machine, {"spec": {"unschedulable": None}})
            await until(lambda: status("one").get("phase") == "Succeeded")
            await until(lambda: status("two").get("phase") == "Succeeded")
            assert status("two")["yields"] >= 1, "the younger one gave way first"

    asyncio.run(scenario())
