"""Nodes as pods on a real control plane: made, lost, refused, waiting, ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dlrover.errors import InfrastructureError
from dlrover.kubernetes.api import client as clients
from dlrover.kubernetes.api.client import PODS, ApiError, Client
from dlrover.kubernetes.machine import nodes, pods
from dlrover.kubernetes.platform import platform as platforms, reporting
from dlrover.kubernetes.platform.platform import KubernetesPlatform
from dlrover.kubernetes.resources import names, validation
from dlrover.platform.base import Progress
from dlrover.spec.node import FoundNode, LaunchNode
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import define
from tests.kubernetes.kubelet import Kubelet

StartKubelet = Callable[..., Kubelet]
SLEEP = ["sleep", "1000"]


def elastic_job(namespace: str, command: list[str], **spec: Any) -> dict[str, Any]:
    container = {"name": "main", "image": "training:1", "command": command}
    container |= spec.pop("container", {})
    template = {"spec": {"containers": [container], "terminationGracePeriodSeconds": 1}}
    worker = {"replicas": 40, "template": template} | spec
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ElasticJob",
        "metadata": {"name": "job", "namespace": namespace},
        "spec": {"replicaSpecs": {"worker": worker}},
    }


def submitted(plane: ControlPlane, manifest: dict[str, Any]) -> dict[str, Any]:
    """The job in the cluster: the garbage collector removes pods whose owner is not there."""
    define(plane)
    namespace = manifest["metadata"]["namespace"]
    path = f"/apis/{names.API_VERSION}/namespaces/{namespace}/elasticjobs"
    made: dict[str, Any] = plane.call("POST", path, manifest)
    return made


class Nodes:
    """A platform, and what it reported."""

    def __init__(self, plane: ControlPlane, namespace: str, manifest: dict[str, Any]) -> None:
        self.plane = plane
        self.namespace = namespace
        self.manifest = manifest
        self.exits: dict[int, str] = {}
        self.codes: dict[int, int] = {}
        self.refused: set[int] = set()
        self.removed: set[int] = set()
        self.waits: dict[int, str] = {}

    @contextlib.asynccontextmanager
    async def platform(self) -> AsyncIterator[KubernetesPlatform]:
        client = Client.from_config(str(self.plane.kubeconfig))
        job = validation.parse(self.manifest)
        one = KubernetesPlatform(client, job, "master:1", self._ended, self.waits.__setitem__)
        await one.start()
        try:
            yield one
        finally:
            await one.close()

    def _ended(
        self,
        node_id: int,
        reason: str,
        /,
        *,
        exit_code: int = 0,
        refused: bool = False,
        removed: bool = False,
    ) -> None:
        assert node_id not in self.exits, "reported once"
        self.exits[node_id] = reason
        self.codes[node_id] = exit_code
        if refused:
            self.refused.add(node_id)
        if removed:
            self.removed.add(node_id)

    def pods(self) -> dict[str, dict[str, Any]]:
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        items = self.plane.call("GET", path)["items"]
        return {item["metadata"]["name"]: item for item in items}

    def running(self) -> set[str]:
        return {name for name, pod in self.pods().items() if pod["status"]["phase"] == "Running"}

    async def until(self, condition: Callable[[], Any], timeout: float = 30.0) -> None:
        late = time.monotonic() + timeout
        while not await asyncio.to_thread(condition):
            assert time.monotonic() < late, (self.exits, self.waits)
            await asyncio.sleep(0.05)


@pytest.mark.slow
def test_thousands_of_pods_that_end_at_once_take_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence says why pods cannot be made; it is not made again for each of them."""
    monkeypatch.setattr(reporting, "LAST_TIMEOUT", 0.0)
    config = {
        "clusters": [{"name": "none", "cluster": {"server": "http://127.0.0.1:9"}}],
        "contexts": [{"name": "none", "context": {"cluster": "none", "user": ""}}],
        "current-context": "none",
    }
    path = tmp_path / "kubeconfig"
    path.write_bytes(msgspec.json.encode(config))
    exits: list[int] = []

    reports: list[str] = []
    monkeypatch.setattr(reporting.Reporter, "waits", lambda _, text: reports.append(text))

    async def end_all() -> float:
        client = Client.from_config(str(path))
        job = validation.parse(elastic_job("team", SLEEP))
        platform = KubernetesPlatform(
            client, job, "master:1", lambda node_id, _reason, **_: exits.append(node_id), id
        )
        platform.report(reporting.Reporter(client, job, lambda: Progress(0, 0, None, None)))
        for node_id in range(4000):
            platform.adopt(node_id, f"job-worker-{node_id}")
        before = time.process_time()
        while len(exits) < 4000:
            await asyncio.sleep(0)
        took = time.process_time() - before
        await platform.close()
        return took

    assert asyncio.run(end_all()) < 0.25
    assert 0 < len(reports) < 10


@pytest.fixture
def make(
    control_plane: ControlPlane, namespace: str, kubelet: StartKubelet
) -> Callable[..., Nodes]:
    def make(command: list[str] = SLEEP, **spec: Any) -> Nodes:
        manifest = submitted(control_plane, elastic_job(namespace, command, **spec))
        name = names.own_name("job", manifest["metadata"]["uid"])
        secret = {"metadata": {"name": name}, "stringData": {"token": "t"}}
        control_plane.call("POST", f"/api/v1/namespaces/{namespace}/secrets", secret)
        return Nodes(control_plane, namespace, manifest)

    return make


def test_a_node_is_a_pod_that_ends_with_a_reason(
    make: Callable[..., Nodes], kubelet: StartKubelet
) -> None:
    kubelet()
    here = make(["sh", "-c", "exit $DLROVER_NODE_RANK"])

    async def story() -> None:
        async with here.platform() as platform:
            assert platform.launch(LaunchNode(7, 3)) == "job-edljob-worker-7"
            platform.launch(LaunchNode(8, 0))
            await here.until(lambda: len(here.exits) == 2)
            assert here.exits[7] == "its container main ended with exit code 3"
            assert here.exits[8] == "its pod ended"
            assert here.codes == {7: 3, 8: 0}

    asyncio.run(story())


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("delete", "its pod was deleted"),
        ("force", "its pod was deleted"),
        ("oom", "its container main ran out of memory (OOMKilled)"),
        ("evict", "its pod failed: Evicted: The test's kubelet: Evicted"),
        ("kill", "its container main ended with exit code 137"),
    ],
)
def test_why_a_node_was_lost_is_told(
    make: Callable[..., Nodes], kubelet: StartKubelet, how: str, reason: str
) -> None:
    kubelets = kubelet()
    here = make()

    async def story() -> None:
        async with here.platform() as platform:
            name = platform.launch(LaunchNode(0, 0))
            await here.until(lambda: here.running() == {name})
            if how == "delete":
                here.plane.kubectl("delete", "pod", name, "--wait=false", namespace=here.namespace)
            elif how == "force":
                path = f"/api/v1/namespaces/{here.namespace}/pods/{name}"
                here.plane.call("DELETE", path, {"gracePeriodSeconds": 0})
            elif how == "evict":
                kubelets.evict(name)
            else:
                kubelets.kill(name, "OOMKilled" if how == "oom" else "")
            await here.until(lambda: here.exits)
            assert here.exits == {0: reason}
            assert here.removed == ({0} if how in ("delete", "force", "evict") else set())

    asyncio.run(story())


@pytest.mark.long
@pytest.mark.timeout(180)
def test_nodes_on_a_machine_that_goes_dark_are_lost(
    make: Callable[..., Nodes],
    kubelet: StartKubelet,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pods, "FORCE_AFTER", 2.0)
    machines = kubelet(nodes=2)
    here = make()

    async def story() -> None:
        async with here.platform() as platform:
            for number in range(4):
                platform.launch(LaunchNode(number, number))
            await here.until(lambda: len(here.running()) == 4)
            # The other machine may have been ready first, and have all of them.
            dark = here.pods()["job-edljob-worker-0"]["spec"]["nodeName"]
            lost = {
                int(pod["metadata"]["labels"][nodes.NODE_LABEL])
                for pod in here.pods().values()
                if pod["spec"]["nodeName"] == dark
            }
            machines.lose(dark)
            await here.until(lambda: set(here.exits) == lost, timeout=120)
            await here.until(lambda: len(here.pods()) == 4 - len(lost), timeout=30)
            assert sum("is deleted by force" in one.message for one in caplog.records) >= len(lost)

    asyncio.run(story())


def test_thirty_pods_that_are_lost_at_once_are_asked_for_again_within_ten_seconds(
    make: Callable[..., Nodes], kubelet: StartKubelet
) -> None:
    kubelet(nodes=3)
    here = make()

    async def story() -> None:
        async with here.platform() as platform:
            for number in range(30):
                platform.launch(LaunchNode(number, number))
            await here.until(lambda: len(here.running()) == 30, timeout=60)
            began = time.monotonic()
            path = f"/api/v1/namespaces/{here.namespace}/pods?gracePeriodSeconds=1"
            await asyncio.to_thread(here.plane.call, "DELETE", path)
            for number in range(30):
                await here.until(lambda number=number: number in here.exits)
                platform.launch(LaunchNode(30 + number, number))
            wanted = {f"job-edljob-worker-{30 + number}" for number in range(30)}
            await here.until(lambda: wanted <= set(here.pods()))
            assert time.monotonic() - began < 10.0

    asyncio.run(story())


def test_a_pod_that_does_not_fit_is_explained(
    make: Callable[..., Nodes], kubelet: StartKubelet
) -> None:
    kubelet(gpu="1")
    gpus = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    here = make(container=gpus)

    async def story() -> None:
        async with here.platform() as platform:
            first, second = platform.launch(LaunchNode(0, 0)), platform.launch(LaunchNode(1, 1))
            await here.until(
                lambda: any("Insufficient nvidia.com/gpu" in w for w in here.waits.values())
            )
            await here.until(lambda: len(here.running()) == 1)
            platform.kill(here.running().pop())
            await here.until(lambda: len(here.exits) == 1)
            waiter = ({0, 1} - set(here.exits)).pop()
            await here.until(lambda: here.waits[waiter] == "", timeout=60)
            assert here.running() <= {first, second}

    asyncio.run(story())


def test_a_volume_that_is_missing_is_named(
    make: Callable[..., Nodes], kubelet: StartKubelet
) -> None:
    kubelet()
    mount = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    here = make(container=mount)
    volume = {"name": "data", "configMap": {"name": "absent"}}
    here.manifest["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["volumes"] = [volume]

    async def story() -> None:
        async with here.platform() as platform:
            platform.launch(LaunchNode(0, 0))
            await here.until(
                lambda: (
                    'FailedMount: MountVolume.SetUp failed for volume "data" : '
                    'configmap "absent" not found' in here.waits.get(0, "")
                )
            )
            absent = {"metadata": {"name": "absent"}}
            path = f"/api/v1/namespaces/{here.namespace}/configmaps"
            here.plane.call("POST", path, absent)
            await here.until(lambda: here.waits[0] == "")
            assert len(here.running()) == 1

    asyncio.run(story())


def test_hosts_are_avoided_and_memory_grows(
    make: Callable[..., Nodes], kubelet: StartKubelet
) -> None:
    machines = kubelet(nodes=2)
    memory = {"resources": {"requests": {"memory": "1Gi"}, "limits": {"memory": "2Gi"}}}
    here = make(container=memory)

    async def story() -> None:
        async with here.platform() as platform:
            for number in range(3):
                platform.launch(LaunchNode(number, number, (machines.nodes[0],), 2.0))
            await here.until(lambda: len(here.running()) == 3)
            for pod in here.pods().values():
                assert pod["spec"]["nodeName"] == machines.nodes[1]
                resources = pod["spec"]["containers"][0]["resources"]
                assert resources["requests"]["memory"] == "2Gi"
                assert resources["limits"]["memory"] == "4Gi"

    asyncio.run(story())


def test_a_pod_that_the_server_refuses_is_a_node_that_ended(make: Callable[..., Nodes]) -> None:
    here = make(container={"volumeMounts": [{"name": "nowhere", "mountPath": "/data"}]})

    async def story() -> None:
        async with here.platform() as platform:
            platform.launch(LaunchNode(0, 0))
            await here.until(lambda: here.exits)
            assert here.exits[0].startswith("its pod was refused: ")
            assert 'Not found: "nowhere"' in here.exits[0]
            assert here.refused == {0}, "and another one would be refused, too"

    asyncio.run(story())


def test_a_quota_is_waited_for_with_its_reason(
    make: Callable[..., Nodes], control_plane: ControlPlane, namespace: str
) -> None:
    here = make()
    base = f"/api/v1/namespaces/{namespace}/resourcequotas"
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    control_plane.call("POST", base, quota)

    async def story() -> None:
        await here.until(
            lambda: control_plane.call("GET", f"{base}/none").get("status", {}).get("hard")
        )
        async with here.platform() as platform:
            name = platform.launch(LaunchNode(0, 0))
            await here.until(lambda: "exceeded quota: none" in here.waits.get(0, ""))
            assert here.pods() == {}
            control_plane.call("DELETE", f"{base}/none")
            await here.until(lambda: name in here.pods())
            assert here.exits == {}

    asyncio.run(story())


def test_another_master_finds_and_adopts_the_nodes(
    make: Callable[..., Nodes], kubelet: StartKubelet, control_plane: ControlPlane
) -> None:
    kubelets = kubelet()
    here = make()

    async def story() -> None:
        async with here.platform() as platform:
            launches = [LaunchNode(number, number + 1, (), 2.0, 1.5) for number in range(3)]
            handles = [platform.launch(launch) for launch in launches]
            await here.until(lambda: len(here.running()) == 3)
        kubelets.kill(handles[0])
        control_plane.kubectl("delete", "pod", handles[1], namespace=here.namespace)
        await here.until(lambda: here.running() == {handles[2]})
        async with here.platform() as platform:
            assert platform.find() == [FoundNode(2, 3, handles[2], 2.0, 1.5)]
            for number, handle in enumerate(handles):
                platform.adopt(number, handle)
            await here.until(lambda: len(here.exits) == 2)
            assert here.exits[0] == "its container main ended with exit code 137"
            assert here.exits[1] == "its pod was deleted while the master was down"
            platform.kill(handles[2])
            await here.until(lambda: 2 in here.exits)

    asyncio.run(story())


def test_no_pod_is_made_twice_and_what_an_earlier_run_left_makes_way(
    make: Callable[..., Nodes], kubelet: StartKubelet, control_plane: ControlPlane
) -> None:
    kubelets = kubelet()
    here = make()

    async def story() -> None:
        async with here.platform() as platform:
            name = platform.launch(LaunchNode(0, 0))
            await here.until(lambda: here.running() == {name})
            uid = here.pods()[name]["metadata"]["uid"]
        async with here.platform() as platform:  # its master died before it knew the answer
            platform.launch(LaunchNode(0, 0))
            await asyncio.sleep(1)
            assert here.pods()[name]["metadata"]["uid"] == uid
            kubelets.kill(name)
            await here.until(lambda: 0 in here.exits)
        here.exits.clear()
        async with here.platform() as platform:
            platform.launch(LaunchNode(0, 0))
            await here.until(lambda: here.running() == {name})
            assert here.pods()[name]["metadata"]["uid"] != uid
            assert here.exits == {}

    asyncio.run(story())


def test_a_pod_of_an_earlier_elastic_job_makes_way_before_the_garbage_collector_comes(
    make: Callable[..., Nodes], kubelet: StartKubelet, control_plane: ControlPlane
) -> None:
    kubelet()
    earlier = make()
    path = f"/apis/{names.API_VERSION}/namespaces/{earlier.namespace}/elasticjobs/job"

    async def story() -> None:
        async with earlier.platform() as platform:
            name = platform.launch(LaunchNode(0, 0))
            await earlier.until(lambda: earlier.running() == {name})
        uid = earlier.pods()[name]["metadata"]["uid"]
        control_plane.call("DELETE", path)
        here = make()
        async with here.platform() as platform:
            assert platform.find() == []
            platform.launch(LaunchNode(0, 0))
            await here.until(
                lambda: here.pods().get(name, {}).get("metadata", {}).get("uid", uid) != uid
            )
            await here.until(lambda: here.running() == {name})
            assert here.exits == {}

    with control_plane.without("kube-controller-manager"):
        asyncio.run(story())


def test_a_node_that_is_killed_before_its_pod_is_made_gets_none(
    make: Callable[..., Nodes], kubelet: StartKubelet
) -> None:
    kubelet()
    here = make()

    async def story() -> None:
        async with here.platform() as platform:
            platform.kill(platform.launch(LaunchNode(0, 0)))
            await here.until(lambda: 0 in here.exits)
            await here.until(lambda: here.pods() == {})

    asyncio.run(story())


def test_a_master_that_leaves_deletes_no_pod_that_it_asked_for(
    make: Callable[..., Nodes], kubelet: StartKubelet
) -> None:
    """Another master may have taken over: it has asked for the same pods."""
    kubelet()
    here = make()

    async def story() -> None:
        async with here.platform() as platform, here.platform() as other:
            for number in range(20):
                other.launch(LaunchNode(number, number))
                platform.launch(LaunchNode(number, number))
            await asyncio.sleep(0.1)
            await platform.close()
            await here.until(lambda: len(here.running()) == 20)
            assert here.exits == {}

    asyncio.run(story())


def test_the_watch_survives_a_restart_of_the_server(
    make: Callable[..., Nodes], kubelet: StartKubelet, control_plane: ControlPlane, tmp_path: Path
) -> None:
    kubelets = kubelet()
    here = make()

    async def story() -> None:
        async with here.platform() as platform:
            first = platform.launch(LaunchNode(0, 0))
            await here.until(lambda: here.running() == {first})
            control_plane.kill("kube-apiserver")
            second = platform.launch(LaunchNode(1, 1))
            kubelets.kill(first)
            await asyncio.to_thread(control_plane.start_api_server)
            await here.until(lambda: 0 in here.exits, timeout=60)
            await here.until(lambda: second in here.running(), timeout=60)
            assert 1 not in here.exits

    asyncio.run(story())


def test_the_pods_of_another_job_are_not_found(
    make: Callable[..., Nodes], control_plane: ControlPlane, namespace: str
) -> None:
    """An earlier job of the same name, say: its pods have the same labels."""
    here = make()
    other = elastic_job(namespace, SLEEP)
    other["metadata"]["name"] = "other"
    uid = submitted(control_plane, other)["metadata"]["uid"]
    earlier = here.manifest | {"metadata": here.manifest["metadata"] | {"uid": uid}}
    pod = nodes.pod(validation.parse(earlier), LaunchNode(5, 5), "master:1")
    pod["metadata"]["ownerReferences"][0]["name"] = "other"

    async def story() -> None:
        client = Client.from_config(str(control_plane.kubeconfig))
        await client.create(PODS, pod)
        await client.close()
        async with here.platform() as platform:
            assert platform.find() == []
        assert set(here.pods()) == {"job-edljob-worker-5"}

    asyncio.run(story())


CONFLICT = (
    'Operation cannot be fulfilled on resourcequotas "gpu": the object has been modified; please apply your '
    "changes to the latest version and try again"
)


@pytest.mark.parametrize(
    ("status", "message", "at_once", "later"),
    [
        (409, CONFLICT, True, True),
        (401, "Unauthorized", True, True),
        (404, 'serviceaccount "x" not found', True, False),
        (403, "pods is forbidden", True, False),
        (403, "exceeded quota: gpu", True, True),
        (422, "spec.containers: Required value", False, False),
        (503, "etcd has no leader", True, True),
    ],
)
def test_what_may_be_otherwise_later_is_asked_for_again(
    status: int, message: str, at_once: bool, later: bool
) -> None:
    error = ApiError(status, "Reason", message)
    may_pass = platforms._may_pass
    assert may_pass(error, 0.0) is at_once
    assert may_pass(error, platforms.FORBIDDEN_GRACE + 1) is later


def test_what_a_server_forbids_is_tried_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has just started does not know its rules yet."""
    now = [100.0]
    monkeypatch.setattr(clients.time, "monotonic", lambda: now[0])
    patience, forbidden = clients.Patience(), ApiError(403, "Forbidden", "no right")
    assert patience.outwaits(forbidden)
    now[0] += clients.FORBIDDEN_GRACE - 1
    assert patience.outwaits(forbidden)
    now[0] += 2
    assert not patience.outwaits(forbidden)
    assert not patience.outwaits(ApiError(422, "Invalid", "wrong"))
    assert patience.outwaits(InfrastructureError("away"))
    assert patience.outwaits(forbidden), "it was away in between"
