"""A job in real containers: by kubelet, containerd and runc, and the kernel's own limits of memory.

Runs where ``DLROVER_REAL_KUBELET`` names a folder with their programs; as root, on control groups of version 1.
One test needs the image that ``scripts/build-images`` wrote into the folder ``DLROVER_TEST_IMAGES``, too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import dlrover
from dlrover.kubernetes.resources import names
from tests.kubernetes import realkubelet
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import Cluster, kustomize
from tests.kubernetes.realkubelet import VARIABLE, RealKubelet

FOLDER = os.environ.get(VARIABLE, "")
IMAGES = os.environ.get("DLROVER_TEST_IMAGES", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        not FOLDER, reason=f"{VARIABLE} names no folder with kubelet and containerd"
    ),
]
STEPS = 60
SCRIPT = f"""
import os, pathlib, sys, time
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
own, greedy = folder / f"rank-{{rank}}", folder / "greedy"
done = int(own.read_text()) if own.exists() else 0
for step in range(done, {STEPS}):
    time.sleep(0.2)
    own.write_text(str(step + 1))
    if rank == "0" and greedy.exists():
        greedy.unlink()
        held = [bytearray(b"1" * (1 << 20)) for _ in range(4096)]
"""


@pytest.fixture
def node(control_plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[RealKubelet]:
    """A node whose pods find the master of the job ``digits``."""
    host = f"{names.master_name('digits')}.{namespace}.svc"
    one = RealKubelet(control_plane, tmp_path / "node", Path(FOLDER), [host])
    try:
        one.start()
        yield one
    finally:
        one.stop()


class Job:
    """A job of two workers that count their steps, in containers of 512 MiB."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        folder.mkdir()
        (folder / "train.py").write_text(SCRIPT)

    def submit(self) -> None:
        plane = self.cluster.plane
        command = ["dlrover-run", "--nnodes=2", f"{self.folder}/train.py", str(self.folder)]
        memory = {"requests": {"memory": "512Mi"}, "limits": {"memory": "512Mi"}}
        worker = realkubelet.template(plane, self.folder, command=command, resources=memory)
        master = realkubelet.template(plane, self.folder)
        roles = {
            "worker": {"replicas": 2, "template": worker},
            "dlrover-master": {"template": master},
        }
        manifest = {
            "apiVersion": names.API_VERSION,
            "kind": "ElasticJob",
            "metadata": {"name": "digits"},
            "spec": {"replicaSpecs": roles},
        }
        self.cluster.create(manifest)

    def steps(self) -> int:
        found = [path.read_text() for path in self.folder.glob("rank-?")]
        return min((int(text) for text in found if text), default=0)

    def pod(self, number: int) -> dict[str, Any] | None:
        wanted = f"digits-edljob-worker-{number}"
        pods = [pod for pod in self.cluster.list("pods") if pod["metadata"]["name"] == wanted]
        return pods[0] if pods else None


def memory(pod: dict[str, Any]) -> str:
    limit: str = pod["spec"]["containers"][0]["resources"]["limits"]["memory"]
    return limit


def test_a_job_in_containers_outlives_a_lack_of_memory_and_the_loss_of_a_pod(
    control_plane: ControlPlane, namespace: str, tmp_path: Path, node: RealKubelet
) -> None:
    job = Job(Cluster(control_plane, namespace, tmp_path), tmp_path / "steps")

    async def story() -> None:
        async with job.cluster.operator():
            job.submit()
            await job.cluster.until(lambda: job.steps() > 3, 90)
            (job.folder / "greedy").touch()
            await job.cluster.until(lambda: job.pod(2) is not None, 60)
            grown = job.pod(2)
            assert grown is not None
            assert memory(grown) == "1Gi"
            before = job.steps()
            await job.cluster.until(lambda: job.steps() > before + 3, 60)
            control_plane.kubectl("delete", "pod", "digits-edljob-worker-1", namespace=namespace)
            await job.cluster.until(lambda: job.pod(3) is not None, 60)
            await job.cluster.phase("Succeeded")

    try:
        asyncio.run(story())
    except AssertionError as error:
        pods = control_plane.kubectl("get", "pods,events", namespace=namespace)
        raise AssertionError(f"{pods}\n{node.log()}") from error
    assert job.steps() == STEPS


# ---- by the image as it is built


def found(
    plane: ControlPlane, image: str, variables: Mapping[str, str] = {}, **more: Any
) -> dict[str, Any]:
    """The specification of a pod on the network of this node, whose container finds the API server."""
    shared = {**realkubelet.api_server(plane), **variables}
    env = [{"name": key, "value": value} for key, value in shared.items()]
    container = {"name": "main", "env": env, **({"image": image} if image else {}), **more}
    return {"hostNetwork": True, "dnsPolicy": "Default", "containers": [container]}


def install(cluster: Cluster) -> None:
    """The operator of ``deploy/namespaced``, once, on the network of its node."""
    plane, namespace = cluster.plane, cluster.namespace
    made = yaml.safe_load(
        yaml.safe_dump(kustomize("namespaced")).replace("dlrover-system", namespace)
    )
    (deployment,) = (one for one in made if one["kind"] == "Deployment")
    deployment["spec"]["replicas"] = 1
    pod = deployment["spec"]["template"]["spec"]
    own = found(plane, "")
    pod["containers"][0]["env"] += own.pop("containers")[0]["env"]
    pod.update(own)
    plane.kubectl("apply", "-f", "-", namespace=namespace, text=yaml.safe_dump_all(made))


def trained(plane: ControlPlane, folder: Path) -> dict[str, Any]:
    """A job whose master is the operator's to complete, and whose workers are as restricted as it."""
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    (folder / "train.py").write_text(SCRIPT)
    restricted = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    worker = found(
        plane,
        f"dlrover:{dlrover.__version__}",
        {"DLROVER_STATE_DIR": "/tmp/dlrover"},
        command=["dlrover-run", "--nnodes=2", "/steps/train.py", "/steps"],
        securityContext=restricted,
        volumeMounts=[
            {"name": "steps", "mountPath": "/steps"},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    )
    worker["volumes"] = [
        {"name": "steps", "hostPath": {"path": str(folder)}},
        {"name": "tmp", "emptyDir": {}},
    ]
    worker["securityContext"] = {"runAsNonRoot": True}
    roles = {
        "worker": {"replicas": 2, "template": {"spec": worker}},
        "dlrover-master": {"template": {"spec": found(plane, "")}},
    }
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ElasticJob",
        "metadata": {"name": "digits"},
        "spec": {"replicaSpecs": roles, "cleanPodPolicy": "None"},
    }


@pytest.mark.skipif(
    not IMAGES, reason="DLROVER_TEST_IMAGES names no folder of scripts/build-images"
)
def test_the_image_is_operator_master_and_workers(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    host = f"{names.master_name('digits')}.{namespace}.svc"
    archive = Path(IMAGES) / "dlrover.tar"
    node = RealKubelet(control_plane, tmp_path / "node", Path(FOLDER), [host], [archive])
    cluster = Cluster(control_plane, namespace, tmp_path)
    try:
        node.start()
        install(cluster)
        cluster.create(trained(control_plane, tmp_path / "steps"))
        asyncio.run(cluster.until(lambda: cluster.status.get("phase") == "Succeeded", 120))
        images = {pod["spec"]["containers"][0]["image"] for pod in cluster.list("pods")}
        assert images == {f"dlrover:{dlrover.__version__}"}
        assert len(cluster.list("pods")) == 4
    except AssertionError as error:
        pods = control_plane.kubectl("get", "pods,events", namespace=namespace)
        raise AssertionError(f"{pods}\n{node.log()}") from error
    finally:
        node.stop()
