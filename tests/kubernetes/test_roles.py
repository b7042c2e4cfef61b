"""Jobs of several roles on a real control plane: the coordinator is the master of one ElasticJob, which owns the roles'."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from dlrover.cli.cluster import elasticrole
from dlrover.dashboard.pods import PodJob
from dlrover.errors import InfrastructureError
from dlrover.kubernetes.machine import objects
from dlrover.kubernetes.platform import job as elastic_job
from dlrover.kubernetes.resources import names, validation
from dlrover.spec.jobdir import JobDir
from dlrover.spec.outcome import Outcome
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import Cluster
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.manifests import job as job_manifest
from tests.process.test_roles import JOB, each_batch_was_learned_once, learned

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
AWAY = 20.0
"""Seconds without an API server."""


class Numbers:
    """The job that the tests of other platforms run, too; its programs write to a folder."""

    def __init__(self, cluster: Cluster, kubelet: Kubelet, folder: Path) -> None:
        self.cluster, self.kubelet, self.folder = cluster, kubelet, folder

    def submit(self, *more: str) -> subprocess.CompletedProcess[str]:
        access = [
            "--namespace",
            self.cluster.namespace,
            "--kubeconfig",
            self.cluster.plane.kubeconfig,
        ]
        words = [
            "--platform",
            "kubernetes",
            "--image",
            "train:1",
            "--working-dir",
            str(JOB.parent),
            *more,
        ]
        command = [sys.executable, "-m", "dlrover.cli.main", "roles", str(JOB)]
        return subprocess.run(
            [*command, *words, *access], env={**os.environ, "OUT": str(self.folder)},
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip

    def pods(self, name: str, role: str = "worker") -> list[str]:
        """The pods that run of an ElasticJob."""
        labels = {names.JOB_LABEL: name, names.ROLE_LABEL: role}
        return sorted(
            pod["metadata"]["name"]
            for pod in self.cluster.list("pods")
            if labels.items() <= pod["metadata"]["labels"].items()
            and pod["status"]["phase"] == "Running"
            and not pod["metadata"].get("deletionTimestamp")
        )

    def delete(self, pod: str) -> str:
        return str(
            self.cluster.plane.call("DELETE", self.cluster.path("pods", pod))["metadata"]["uid"]
        )

    def replaced(self, name: str, gone: str) -> bool:
        pods = self.pods(name)
        return len(pods) == 2 and gone not in pods

    @property
    def directory(self) -> Path:
        """Of the job, in its coordinator's pod."""
        (found,) = (self.kubelet.folder / "claims" / "journal").glob("elasticjob-*")
        return found

    def events(self, role: str) -> str:
        return (self.directory / "roles" / role / "events.jsonl").read_text()

    async def pages(self) -> dict[str, str]:
        """Where the dashboard's page of the job says that each role's own page is."""
        page = PodJob(str(self.cluster.plane.kubeconfig), self.cluster.namespace, "numbers")
        async with contextlib.aclosing(page.view()) as parts:
            async for text in parts:
                if text.startswith("event: roles"):
                    roles = json.loads(text.partition("data: ")[2])["roles"]
                    return {role["name"]: role["page"] for role in roles}
        raise AssertionError("the view ends with its reader")

    def restarts(self) -> dict[str, int]:
        command = [sys.executable, "-m", "dlrover.cli.main", "status", "--output", "json"]
        done = subprocess.run(
            [*command, "--job-dir", self.directory], capture_output=True, text=True, check=True
        )
        return {
            role["name"]: role["restarts"] for role in json.loads(done.stdout)["status"]["roles"]
        }

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with contextlib.suppress(OSError, http.client.HTTPException):  # the API server is away
            found = self.cluster.get("elasticjobs", "numbers").get("status", {})
        return found

    def log(self) -> str:
        said = [f"==> {name}\n{self.kubelet.log(name)}" for name in sorted(self.kubelet.pods)]
        kinds = ("master.log", "coordinator.log", "kubernetes.log")
        logs = [path for name in kinds for path in self.kubelet.folder.rglob(name)]
        said += [f"==> {path}\n{path.read_text()[-4000:]}" for path in sorted(logs)]
        return "\n".join([*said, json.dumps(self.status, indent=1)])

    async def until(self, condition: Callable[[], bool], timeout: float = 120.0) -> None:
        late = time.monotonic() + timeout
        while not await asyncio.to_thread(condition):
            if time.monotonic() > late or self.status.get("phase") in ("Failed", "Rejected"):
                pytest.fail(self.log())
            await asyncio.sleep(0.1)

    async def more(self) -> None:
        """Wait for a few more batches."""
        enough = len(learned(self.folder)) + 4  # the queue takes 3
        await self.until(lambda: len(learned(self.folder)) >= enough)

    def coordinators(self) -> list[psutil.Process]:
        """The coordinator's process in its pod, if it has been started."""
        container = self.kubelet.pods[names.master_name("numbers")].containers[0].process
        assert container is not None
        with contextlib.suppress(psutil.Error):
            inside = psutil.Process(container.pid).children()
            return [one for one in inside if "dlrover.roles" in one.cmdline()]
        return []

    async def without_api_server(self, pod: str) -> None:
        """Stop the API server for a while; meanwhile a pod dies, and batches are learned."""
        plane, back = self.cluster.plane, time.monotonic() + AWAY
        await asyncio.to_thread(plane.kill, "kube-apiserver")
        self.kubelet.kill(pod)
        of_job = {elastic_job.VARIABLE: f"{self.cluster.namespace}/numbers"}
        another = asyncio.create_task(elastic_job.fetch(of_job))  # as a pod does that starts
        await self.more()
        await self.until(lambda: time.monotonic() > back)
        assert not another.done()
        await asyncio.to_thread(plane.start_api_server)
        assert (await another).name == "numbers"


@pytest.fixture
def job(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, kubelet: Callable[..., Kubelet]
) -> Numbers:
    folder = tmp_path / "out"
    folder.mkdir()
    return Numbers(Cluster(control_plane, namespace, tmp_path), kubelet(nodes=2), folder)


def claim(job: Numbers) -> None:
    """A volume that outlives the coordinator's pod."""
    name, size = f"journal-{job.cluster.namespace}", {"storage": "1Gi"}
    common = {"accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    volume = {**common, "capacity": size, "hostPath": {"path": str(job.folder)}}
    wanted = {**common, "resources": {"requests": size}, "volumeName": name}
    call = job.cluster.plane.call
    call("POST", "/api/v1/persistentvolumes", {"metadata": {"name": name}, "spec": volume})
    path = job.cluster.path("persistentvolumeclaims")
    call("POST", path, {"metadata": {"name": "journal"}, "spec": wanted})


def test_whatever_dies_the_others_go_on_and_nothing_stays(
    job: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = names.master_name("numbers")
    monkeypatch.setenv("KUBECONFIG", str(job.cluster.plane.kubeconfig))

    async def story() -> None:
        async with job.cluster.operator():
            claim(job)
            done = await asyncio.to_thread(job.submit, "--tls", "--journal-claim", "journal")
            assert done.returncode == 0, done.stderr
            await job.more()
            trainers, (first, second) = job.pods("numbers-trainer"), job.pods("numbers-rollout")
            again = await asyncio.to_thread(job.submit)
            assert (again.returncode, "already has an ElasticJob" in again.stderr) == (2, True)

            assert await job.pages() == {
                role: f"{job.cluster.namespace}/numbers-{role}"
                for role in ("trainer", "rollout", "main")
            }

            job.delete(names.master_name("numbers-rollout"))  # with its journal
            job.coordinators()[0].kill()
            await job.until(lambda: job.events("rollout").count("node_connected") >= 4)
            await job.more()
            uid = job.kubelet.pods[coordinator].uid
            job.delete(coordinator)
            await job.until(lambda: job.kubelet.pods[coordinator].uid != uid)
            await job.until(lambda: bool(job.coordinators()))
            await job.without_api_server(first)
            job.delete(trainers[0])
            job.cluster.plane.call("DELETE", job.cluster.path("elasticjobs", "numbers-main"))
            for role, gone in (("rollout", first), ("trainer", trainers[0])):
                await job.until(lambda of=role, gone=gone: job.replaced(f"numbers-{of}", gone))
            await job.more()
            assert second in job.pods("numbers-rollout")
            assert trainers[1] in job.pods("numbers-trainer")
            # One of each role; more where a busy machine is slow to answer.
            least = {"main": 1, "rollout": 1, "trainer": 1}
            await job.until(lambda: all(job.restarts()[role] >= n for role, n in least.items()))
            # The driver's second start does what the first one had served and not put.
            await job.more()
            (job.folder / "enough").touch()
            await job.until(lambda: job.status.get("phase") == "Succeeded")

    asyncio.run(story())
    each_batch_was_learned_once(job.folder)
    assert [one["metadata"]["name"] for one in job.cluster.list("elasticjobs")] == ["numbers"]
    assert {one["metadata"]["name"] for one in job.cluster.list("pods")} <= {coordinator}


def test_what_a_coordinator_without_its_journal_finds_of_its_roles_is_removed(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(control_plane, namespace, tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig))
    made = job_manifest()
    made["metadata"] = {"name": "numbers", "namespace": namespace}
    roles = {name: {"entry": "main.py"} for name in ("ours", "theirs", "none")}
    container = {"name": "main", "image": "train:1"}
    master = {names.MASTER_ROLE: {"template": {"spec": {"containers": [container]}}}}
    cluster.create({**made, "spec": {"roles": roles, "replicaSpecs": master}})
    parent = validation.parse(cluster.get("elasticjobs", "numbers"))
    for role in ("ours", "theirs"):
        owners = [objects.owner(parent)] if role == "ours" else []
        metadata = {"name": f"numbers-{role}", "ownerReferences": owners}
        cluster.create({**job_manifest(), "metadata": metadata})
    asyncio.run(elasticrole.clear(parent))
    left = {one["metadata"]["name"] for one in cluster.list("elasticjobs")}
    assert left == {"numbers", "numbers-theirs"}


def test_a_role_that_is_stopped_does_not_wait_for_the_api_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> Outcome:
        stopping = asyncio.Event()

        async def away(*_: object) -> NoReturn:
            stopping.set()
            raise InfrastructureError("The API server does not answer.")

        monkeypatch.setattr("dlrover.kubernetes.platform.job.read", away)
        work = elasticrole._work(None, JobDir(tmp_path), {}, 1, {}, stopping)  # type: ignore[arg-type]
        return await asyncio.wait_for(work, 20)

    assert asyncio.run(story()) == elasticrole.STOPPED
