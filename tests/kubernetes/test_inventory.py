"""What the Brain sees of a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dlrover.brain import app
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.kubernetes.platform.inventory import inventory, requests_of
from dlrover.kubernetes.resources import names
from dlrover.spec import brain
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.kubelet import Kubelet

GIB = 1 << 30


def machine(name: str, *, ready: str = "True", **spec: Any) -> dict[str, Any]:
    allocatable = {"cpu": "7500m", "memory": "16Gi", "nvidia.com/gpu": "4", "pods": "110"}
    conditions = [{"type": "Ready", "status": ready}]
    status = {"allocatable": allocatable, "conditions": conditions}
    return {"metadata": {"name": name}, "spec": spec, "status": status}


def pod(
    node: str, requests: dict[str, str], phase: str = "Running", role: str = ""
) -> dict[str, Any]:
    spec: dict[str, Any] = {"containers": [{"resources": {"requests": requests}}]}
    if node:
        spec["nodeName"] = node
    labels = {names.ROLE_LABEL: role} if role else {}
    return {"metadata": {"labels": labels}, "spec": spec, "status": {"phase": phase}}


def test_pods_count_while_they_are_placed_and_run() -> None:
    asked = {"cpu": "500m", "memory": "1Gi", "nvidia.com/gpu": "1"}
    pods = [
        pod("a", asked),
        pod("a", asked, role="worker"),
        pod("a", asked, role="dlrover-master"),
        pod("a", asked, phase="Succeeded"),
        pod("", asked, phase="Pending"),
        pod("b", {"cpu": "1"}, phase="Pending"),
    ]
    a, b = inventory([machine("a"), machine("b")], pods)
    assert a.capacity == {"cpu": 7.5, "memory": 16 * GIB, "accelerator": 4}
    assert a.used == {"cpu": 1.5, "memory": 3 * GIB, "accelerator": 3}
    assert a.by_jobs == {"cpu": 0.5, "memory": GIB, "accelerator": 1}
    assert b.used == {"cpu": 1}


def test_machines_that_take_no_pods_are_not_ready() -> None:
    found = inventory(
        [machine("a"), machine("b", ready="Unknown"), machine("c", unschedulable=True)], []
    )
    assert [one.ready for one in found] == [True, False, False]


def test_a_pod_asks_for_its_largest_moment() -> None:
    def container(cpu: str, **more: Any) -> dict[str, Any]:
        return {"resources": {"limits": {"cpu": cpu}}, **more}

    spec = {
        "containers": [container("1"), container("2")],
        "initContainers": [container("5"), container("500m", restartPolicy="Always")],
        "overhead": {"cpu": "250m"},
    }
    assert requests_of({"spec": spec}) == {"cpu": 5.25}


def test_the_monitor_reports_what_the_api_server_knows(
    control_plane: ControlPlane, namespace: str, kubelet: Callable[..., Kubelet]
) -> None:
    nodes = kubelet(nodes=2, cpu="8", memory="4Gi", gpu="2").nodes
    running = {
        "metadata": {"name": "one", "labels": {names.ROLE_LABEL: "worker"}},
        "spec": {
            "nodeName": nodes[0],
            "containers": [
                {
                    "name": "main",
                    "image": "none",
                    "command": ["sleep", "60"],
                    "resources": {"requests": {"cpu": "3"}},
                }
            ],
        },
    }
    control_plane.call("POST", f"/api/v1/namespaces/{namespace}/pods", running)

    async def look() -> brain.ReportCluster:
        found: asyncio.Queue[brain.ReportCluster] = asyncio.Queue()
        opened = app.open_inventory("kubernetes", str(control_plane.kubeconfig))
        task = asyncio.create_task(app.watch(opened, found.put, interval=0.1))
        try:
            while True:
                report = await found.get()
                ours = [one for one in report.nodes if one.name in nodes]
                if len(ours) == 2 and all(one.ready for one in ours):
                    return report
        finally:
            task.cancel()
            await opened.close()

    report = asyncio.run(asyncio.wait_for(look(), 30))
    first, second = sorted(
        (one for one in report.nodes if one.name in nodes), key=lambda one: one.name
    )
    assert first.capacity == {"cpu": 8, "memory": 4 * GIB, "accelerator": 2}
    assert (first.used, first.by_jobs) == ({"cpu": 3}, {"cpu": 3})
    assert second.used == {}


def test_a_cluster_that_is_away_is_asked_again() -> None:
    class Flaky:
        looks = 0

        async def nodes(self) -> tuple[brain.ClusterNode, ...]:
            self.looks += 1
            if self.looks < 3:
                raise InfrastructureError("It is away.")
            return ()

        async def close(self) -> None: ...

    async def look() -> brain.ReportCluster:
        found: asyncio.Queue[brain.ReportCluster] = asyncio.Queue()
        task = asyncio.create_task(app.watch(Flaky(), found.put, interval=0.001))
        try:
            return await found.get()
        finally:
            task.cancel()

    assert asyncio.run(asyncio.wait_for(look(), 5)).nodes == ()


def test_other_clusters_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="accepted is kubernetes"):
        app.open_inventory("slurm", "")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        app.open_inventory("kubernetes", "/no/such/file")
