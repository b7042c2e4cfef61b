"""A running job on a real control plane gets larger pods, by ScalePlans."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrover.kubernetes.resources import names
from tests.kubernetes.installed import Cluster
from tests.kubernetes.kubelet import Kubelet
from tests.kubernetes.test_scaling import Scaled

REQUESTS = {"cpu": "500m", "memory": "1Gi"}


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path, kubelet: Callable[..., Kubelet]) -> Scaled:
    return Scaled(cluster, kubelet(nodes=2), tmp_path)


def requests(job: Scaled) -> dict[str, tuple[str, str]]:
    """What the pods of the workers that run ask for."""
    found = {}
    for pod in job.workers():
        container = job.cluster.get("pods", pod)["spec"]["containers"][0]
        asked = container["resources"]["requests"]
        found[pod.rpartition("-")[2]] = (asked["cpu"], asked["memory"])
    return found


@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_plan_has_pods_replaced_by_larger_ones(job: Scaled) -> None:
    async def story() -> None:
        async with job.cluster.operator():
            job.submit(2, resources={"requests": REQUESTS})
            await job.until(lambda: job.worlds() == ["2"])
            pod = "digits-edljob-worker-1"
            job.plan("wrong", migratePods=[{"name": "digits-edljob-worker-7"}])
            phase, message = await job.ends("wrong")
            assert phase == "Failed"
            assert message.startswith("spec.migratePods[0].name is digits-edljob-worker-7, no pod")
            job.plan("larger", migratePods=[{"name": pod, "resource": {"cpu": 1, "memory": "2Gi"}}])
            assert await job.ends("larger") == (
                "Succeeded",
                f"Another pod has replaced {pod}.",
            )
            assert requests(job) == {"0": ("500m", "1Gi"), "2": ("1", "2Gi")}
            # Another master, without a journal, knows the sizes that pods have.
            job.delete(names.master_name("digits"))
            await job.until(lambda: job.cluster.told.get("MasterReady") == 2)
            resource = {"cpu": 1, "memory": "2Gi"}
            job.plan("all", replicaResourceSpecs={"worker": {"replicas": 3, "resource": resource}})
            assert await job.ends("all") == (
                "Succeeded",
                "The job has 3 workers. The pods of worker have cpu 1 and memory 2Gi.",
            )
            sizes = requests(job)
            assert set(sizes.values()) == {("1", "2Gi")}
            assert len(sizes) == 3
            assert "2" in sizes, "it had that size"
            (job.folder / "go").touch()
            await job.until(lambda: job.cluster.status.get("phase") == "Succeeded")
            assert job.cluster.status["training"]["restarts"] == 0

    asyncio.run(story())
