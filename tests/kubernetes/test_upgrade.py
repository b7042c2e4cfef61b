"""From an earlier release to this one while a job runs: its pods stay, and it is looked after as any other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dlrover.kubernetes.resources import names, times
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import Cluster, define
from tests.kubernetes.kubelet import Kubelet

EARLIER = Path(__file__).parent / "earlier"
MASTER = names.master_name("digits")


def earlier_release(cluster: Cluster) -> None:
    """Leave what an earlier release left: its definition, and all objects of a job that runs."""
    plane, namespace = cluster.plane, cluster.namespace
    plane.knows_jobs = False
    plane.kubectl("replace", "--validate=false", "-f", str(EARLIER / "elasticjobs.yaml"))
    text = (EARLIER / "made.yaml").read_text().replace("NAMESPACE", namespace)
    text = text.replace("TIME", times.written(time.time()))
    job = next(yaml.safe_load_all(text))
    uid = plane.call("POST", cluster.path("elasticjobs"), job)["metadata"]["uid"]
    text = text.replace("-UID", f"-{uid.partition('-')[0]}").replace("UID", uid)
    for made in list(yaml.safe_load_all(text))[1:]:
        if made["kind"] == "Status":
            path = f"{cluster.path('elasticjobs', 'digits')}/status"
            plane.call("PATCH", path, {"status": made["status"]})
            continue
        plane.make(made, namespace)
        if made["kind"] == "ServiceAccount":
            plane.wait_for_account(namespace, made["metadata"]["name"])


def test_an_upgrade_leaves_a_running_job_alone_and_then_looks_after_it(
    control_plane: ControlPlane,
    namespace: str,
    tmp_path: Path,
    kubelet: Callable[..., Kubelet],
) -> None:
    cluster = Cluster(control_plane, namespace, tmp_path)
    node = kubelet()

    def pods() -> dict[str, str]:
        found = cluster.list("pods")
        return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in found}

    def running() -> bool:
        phases = [pod["status"].get("phase") for pod in cluster.list("pods")]
        return phases == ["Running"] * 3

    def condition(kind: str) -> dict[str, Any]:
        found = cluster.status.get("conditions", ())
        return next((c for c in found if c["type"] == kind), {"status": ""})

    async def story() -> None:
        try:
            earlier_release(cluster)
            await cluster.until(running)
        finally:
            define(control_plane)  # `kubectl apply -k deploy/crds`: other tests need it, too
        before = pods()
        async with cluster.operator():
            await cluster.until(lambda: condition("Running")["status"] == "True")
            assert pods() == before
            status = cluster.status
            assert status["master"]["starts"] == 1
            assert '"image":"train:1"' in status["runningSpec"]
            assert not cluster.told.keys() & {
                "MasterLost",
                "MasterStarted",
                "NotApplied",
                "Rejected",
            }
            node.kill(MASTER)
            await cluster.until(lambda: cluster.told.get("MasterReady") == 2)
            after = pods()
            assert after.pop(MASTER) != before.pop(MASTER)
            assert after == before, "the workers train on"

    asyncio.run(story())
