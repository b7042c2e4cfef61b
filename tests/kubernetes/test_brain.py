"""The Brain as the manifests of ``deploy/brain`` run it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import yaml

import dlrover
from dlrover.errors import InfrastructureError
from dlrover.rpc.brain import BrainClient
from dlrover.spec import brain
from tests.kubernetes.controlplane import ControlPlane
from tests.kubernetes.installed import DEPLOY, kustomize
from tests.kubernetes.kubelet import Kubelet

TOKEN = "a-token-of-the-cluster"


def test_the_image_is_of_this_release() -> None:
    kustomization = yaml.safe_load((DEPLOY / "brain/kustomization.yaml").read_text())
    assert kustomization["images"][0]["newTag"] == dlrover.__version__


def test_what_is_installed_sees_the_cluster_and_no_more(
    control_plane: ControlPlane, namespace: str, kubelet: Callable[..., Kubelet]
) -> None:
    node = kubelet(cpu="8", gpu="2")
    control_plane.kubectl(
        "create", "secret", "generic", "dlrover-brain", f"--from-literal=token={TOKEN}",
        namespace=namespace,
    )  # fmt: skip
    documents = [
        one
        for one in kustomize("brain")
        if one["kind"] not in ("ClusterRole", "ClusterRoleBinding")
    ]
    rights = [
        one for one in kustomize("brain") if one["kind"] in ("ClusterRole", "ClusterRoleBinding")
    ]
    for one in rights:  # a cluster has one of a name
        one["metadata"]["name"] = f"dlrover-brain-{namespace}"
    rights[1]["roleRef"]["name"] = f"dlrover-brain-{namespace}"
    text = yaml.safe_dump_all([*documents, *rights, volume(namespace)])
    text = text.replace("dlrover-system", namespace)
    control_plane.kubectl("apply", "-f", "-", namespace=namespace, text=text)
    try:
        cluster = asyncio.run(seen(control_plane, namespace, node.nodes[0]))
    finally:
        for kind in ("clusterrolebinding", "clusterrole", "persistentvolume"):
            control_plane.kubectl("delete", kind, f"dlrover-brain-{namespace}", "--wait=false")
    (found,) = [one for one in cluster.nodes if one.name == node.nodes[0]]
    assert found.capacity["accelerator"] == 2
    assert found.used["cpu"] == pytest.approx(0.5)  # the Brain's own
    assert found.by_jobs == {}


def volume(namespace: str) -> dict[str, Any]:
    """What the claim is bound to; the kubelet of the tests has a directory for it."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"dlrover-brain-{namespace}"},
        "spec": {
            "capacity": {"storage": "10Gi"},
            "accessModes": ["ReadWriteOnce"],
            "hostPath": {"path": "/var/lib/brain"},
            "claimRef": {"namespace": namespace, "name": "dlrover-brain"},
        },
    }


async def seen(plane: ControlPlane, namespace: str, node: str) -> brain.ClusterResources:
    """What the Brain says of the cluster, once it knows its own pod on ``node``."""
    until = time.monotonic() + 60
    while True:
        address = await asyncio.to_thread(pod_address, plane, namespace)
        if address:
            async with BrainClient(f"{address}:29500", TOKEN, timeout=2.0) as client:
                try:
                    cluster = await client.cluster()
                except InfrastructureError:
                    cluster = brain.ClusterResources()
            if any(one.name == node and one.used for one in cluster.nodes):
                return cluster
        assert time.monotonic() < until, plane.kubectl("describe", "pods", namespace=namespace)
        await asyncio.sleep(0.2)


def pod_address(plane: ControlPlane, namespace: str) -> str:
    pods = plane.call("GET", f"/api/v1/namespaces/{namespace}/pods")["items"]
    return str(pods[0].get("status", {}).get("podIP", "")) if pods else ""
