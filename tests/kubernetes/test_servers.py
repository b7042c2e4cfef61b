"""Jobs with parameter servers: role ps of an ElasticJob."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrover.errors import ConfigurationError
from dlrover.kubernetes.machine import nodes
from dlrover.kubernetes.platform import job as jobs
from dlrover.kubernetes.resources import commands, names, validation
from dlrover.kubernetes.resources.types import ElasticJob
from dlrover.spec.node import FIRST_SERVER, LaunchNode
from tests.kubernetes.installed import Cluster
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.test_scaling import Scaled


def role(replicas: int, *words: str, **more: Any) -> dict[str, Any]:
    command = ["dlrover-run", *words]
    main = {"name": "main", "image": "training:1", "command": command}
    return {"replicas": replicas, "template": {"spec": {"containers": [main]}}} | more


def parsed(**roles: dict[str, Any]) -> ElasticJob:
    return validation.parse(
        {
            "apiVersion": names.API_VERSION,
            "kind": "ElasticJob",
            "metadata": {"name": "train", "namespace": "team", "uid": "u1"},
            "spec": {"replicaSpecs": roles},
        }
    )


# ---- the job as its master reads it


@pytest.mark.parametrize(
    ("roles", "numbers"),
    [
        ({"worker": role(4), "ps": role(2)}, (4, 4, 4, 2, 2, 2, 0)),
        ({"worker": role(4, minReplicas=1), "ps": role(2)}, (1, 4, 4, 2, 2, 2, 0)),
        ({"worker": role(4), "PS": role(3, minReplicas=1)}, (4, 4, 4, 1, 3, 3, 0)),
        ({"worker": role(4, "--nnodes=2:4"), "ps": role(3)}, (2, 4, 4, 3, 3, 3, 0)),
        ({"worker": role(2), "chief": role(1), "ps": role(1)}, (3, 3, 3, 1, 1, 1, 1)),
        ({"chief": role(1), "ps": role(1)}, (1, 1, 1, 1, 1, 1, 1)),
        ({"worker": role(2), "ps": role(0)}, (2, 2, 2, 0, 0, 0, 0)),
    ],
)
def test_servers_are_counted_beside_the_other_nodes(
    roles: dict[str, dict[str, Any]], numbers: tuple[int, ...]
) -> None:
    job = parsed(**roles)
    spec = jobs.request(job).job
    assert (
        spec.min_nodes,
        spec.max_nodes,
        spec.managed_nodes,
        spec.min_servers,
        spec.max_servers,
        spec.servers,
        spec.other_nodes,
    ) == numbers
    assert commands.fewest_nodes(job) == spec.min_nodes + spec.min_servers


@pytest.mark.parametrize("workers", [{}, {"worker": role(0)}])
def test_servers_without_a_worker_are_refused(workers: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parsed(ps=role(2), **workers)
    assert str(caught.value) == (
        "spec.replicaSpecs has no pod but 2 of ps: servers need a worker or a chief, with replicas of 1 or "
        "more."
    )


def test_the_pod_of_a_server() -> None:
    job = parsed(worker=role(2), ps=role(2, "serve.py", priority="0.5"))
    pods = [
        nodes.pod(job, LaunchNode(5 + i, FIRST_SERVER + i), "master.team.svc:50001")
        for i in range(2)
    ]
    first = pods[0]
    assert first["metadata"]["name"] == "train-edljob-ps-5"
    assert first["metadata"]["labels"][names.ROLE_LABEL] == "ps"
    assert nodes.node_rank(first) == FIRST_SERVER
    container = first["spec"]["containers"][0]
    assert container["command"] == ["dlrover-run", "serve.py"]
    env = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (env["DLROVER_NODE_RANK"], env["NODE_NUM"]) == (str(FIRST_SERVER), "4")
    assert (env["NODE_TYPE"], env["NODE_RANK"]) == ("ps", "0")
    assert [pod["spec"]["priorityClassName"] for pod in pods] == ["high", "low"]


# ---- on a real control plane

SCRIPT = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
env = os.environ
role, rank, size = env["ROLE_NAME"], env["ROLE_RANK"], env["ROLE_WORLD_SIZE"]
with open(folder / "starts", "a") as starts:
    starts.write(f"{role} {rank} of {size}, {env['RANK']} of {env['WORLD_SIZE']}, {env['LOCAL_WORLD_SIZE']}\\n")
while role == "ps" or not (folder / "go").exists():
    time.sleep(0.05)
"""


class Served(Scaled):
    """A job whose servers run for ever, and whose workers wait for a file."""

    def __init__(self, cluster: Cluster, kubelet: Kubelet, folder: Path) -> None:
        super().__init__(cluster, kubelet, folder)
        self.script.write_text(SCRIPT)

    def submit_with_servers(self, workers: int, servers: int) -> None:
        words = ["--nproc-per-node=2", str(self.script), str(self.folder)]
        roles = {"worker": role(workers, *words), "PS": role(servers, *words, minReplicas=1)}
        self.cluster.create(
            {
                "apiVersion": names.API_VERSION,
                "kind": "ElasticJob",
                "metadata": {"name": "digits"},
                "spec": {"distributionStrategy": "ParameterServerStrategy", "replicaSpecs": roles},
            }
        )

    def starts(self) -> list[str]:
        path = self.folder / "starts"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def in_manifest(self) -> tuple[int, int]:
        """Replicas of workers and of servers."""
        roles = self.cluster.get("elasticjobs", "digits")["spec"]["replicaSpecs"]
        return roles["worker"]["replicas"], roles["PS"]["replicas"]

    def change_servers(self, replicas: int) -> None:
        patch = {"spec": {"replicaSpecs": {"PS": {"replicas": replicas}}}}
        self.cluster.plane.call("PATCH", self.cluster.path("elasticjobs", "digits"), patch)

    async def forms(self, workers: int, servers: int) -> None:
        """Wait for a world of so many nodes, and for the last of its processes to begin."""
        total = 2 * workers + servers
        last = f"ps {servers - 1} of {servers}, {total - 1} of {total}, 1"
        seen = self.starts().count(last)
        await self.until(lambda: self.starts().count(last) > seen)


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path, kubelet: Callable[..., Kubelet]) -> Served:
    return Served(cluster, kubelet(nodes=2), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_servers_come_go_and_are_replaced(job: Served) -> None:
    async def story() -> None:
        async with job.cluster.operator():
            job.submit_with_servers(1, 1)
            await job.forms(1, 1)
            assert job.workers() == ["digits-edljob-ps-1", "digits-edljob-worker-0"]
            job.change_servers(2)
            await job.forms(1, 2)
            (told,) = job.events("Scaled")
            assert told.startswith("The job will have 2 ps nodes instead of 1: 1 is being started")
            job.plan(
                "other", replicaResourceSpecs={"ps": {"replicas": 1}, "worker": {"replicas": 2}}
            )
            assert await job.ends("other") == ("Succeeded", "The job has 2 workers and 1 server.")
            assert job.in_manifest() == (2, 1), "a next master reads it there"
            job.delete(names.master_name("digits"))
            await job.until(lambda: job.cluster.told.get("MasterReady") == 2)
            job.delete("digits-edljob-ps-1")
            await job.forms(2, 1)
            assert len([pod for pod in job.workers() if "-ps-" in pod]) == 1
            (job.folder / "go").touch()
            await job.until(lambda: job.cluster.status.get("phase") == "Succeeded")

    asyncio.run(story())
