"""Replicas in pods: the loss of one pod stops no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kubernetes.installed import Cluster
from tests.kubernetes.kubelet import Kubelet

pytestmark = [pytest.mark.long, pytest.mark.torch, pytest.mark.timeout(240)]
SCRIPT = Path(__file__).parents[1] / "process" / "scripts" / "replicas.py"


def test_the_replica_in_a_lost_pod_is_replaced_and_the_other_keeps_its_process(
    cluster: Cluster, kubelet: Callable[..., Kubelet], tmp_path: Path
) -> None:
    kubelet(nodes=2)
    out = tmp_path / "out"
    out.mkdir()

    def lines(rank: int) -> list[list[str]]:
        path = out / f"rank{rank}.txt"
        return [one.split() for one in path.read_text().splitlines()] if path.exists() else []

    def together() -> bool:
        return all(lines(rank) and lines(rank)[-1][-1] == "2" for rank in (0, 1))

    async def story() -> None:
        async with cluster.operator():
            command = ["dlrover-run", "--survive", str(SCRIPT), str(out), "0.1"]
            main = {"name": "main", "image": "training:1", "command": command}
            worker = {"replicas": 2, "template": {"spec": {"containers": [main]}}}
            manifest = {
                "apiVersion": "elastic.iml.github.io/v1alpha1",
                "kind": "ElasticJob",
                "metadata": {"name": "digits"},
                "spec": {"replicaSpecs": {"worker": worker}},
            }
            cluster.create(manifest)
            await cluster.until(together, 90)
            stays = lines(0)[-1][2]
            cluster.plane.call("DELETE", cluster.path("pods", "digits-edljob-worker-1"))
            lost = lines(1)[-1][2]
            await cluster.until(lambda: together() and lines(1)[-1][2] != lost, 90)
            assert lines(0)[-1][2] == stays
            (out / "last").write_text(str(int(lines(0)[-1][0]) + 20))
            await cluster.phase("Succeeded")

    asyncio.run(story())
