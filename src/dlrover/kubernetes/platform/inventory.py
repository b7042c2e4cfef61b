"""The Brain's view of a Kubernetes cluster: the machines and the resources in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dlrover import accelerators
from dlrover.kubernetes.machine import nodes
from dlrover.kubernetes.machine.pods import ended
from dlrover.kubernetes.resources import names
from dlrover.kubernetes.resources.quantities import quantity
from dlrover.kubernetes.resources.types import Manifest
from dlrover.spec.brain import ClusterNode

PLAIN = ("cpu", "memory")
"""Resources that keep their Kubernetes names."""
KINDS = ("gpu", "npu")
"""Suffixes of accelerator resource names, independent of the vendor."""


class KubernetesInventory:
    """Reads nodes and pods. ``source``: a kubeconfig; empty: the pod's account or the user's kubeconfig."""

    def __init__(self, source: str = "") -> None:
        from dlrover.kubernetes.api.client import Client  # noqa: PLC0415 - needs the extra

        self._client = Client.from_config(source)

    async def nodes(self) -> tuple[ClusterNode, ...]:
        """Return the machines that run kubelets, with the requests of their pods."""
        from dlrover.kubernetes.api.client import NODES, PODS  # noqa: PLC0415 - needs the extra

        machines, _ = await self._client.list(NODES)
        pods, _ = await self._client.list(PODS)
        return inventory(machines, pods)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


def inventory(machines: Iterable[Manifest], pods: Iterable[Manifest]) -> tuple[ClusterNode, ...]:
    """Return the machines' capacities, the requests of the pods on them, and the part requested by jobs.

    A pod counts from its placement until its containers have ended.
    """
    used: dict[str, dict[str, float]] = {}
    by_jobs: dict[str, dict[str, float]] = {}
    for pod in pods:
        place = (pod.get("spec") or {}).get("nodeName")
        if not place or ended(pod):
            continue
        asked = requests_of(pod)
        _add(used.setdefault(place, {}), asked)
        labels = pod["metadata"].get("labels") or {}
        if labels.get(names.ROLE_LABEL) in nodes.ROLES:
            _add(by_jobs.setdefault(place, {}), asked)
    return tuple(
        ClusterNode(
            name=name,
            capacity=_amounts((machine.get("status") or {}).get("allocatable") or {}),
            used=used.get(name, {}),
            by_jobs=by_jobs.get(name, {}),
            ready=_ready(machine),
        )
        for machine in machines
        for name in [machine["metadata"]["name"]]
    )


def requests_of(pod: Manifest) -> dict[str, float]:
    """Return a pod's requests: its containers' total, or the peak of its init containers if higher."""
    spec = pod["spec"]
    beside: dict[str, float] = {}  # init containers that keep running beside the others
    peak: dict[str, float] = {}
    for container in spec.get("initContainers") or ():
        moment = dict(beside)
        _add(moment, _requests(container))
        if container.get("restartPolicy") == "Always":
            beside = moment
        peak = _larger(peak, moment)
    for container in spec.get("containers") or ():
        _add(beside, _requests(container))
    total = _larger(peak, beside)
    _add(total, _amounts(spec.get("overhead") or {}))
    return total


def _larger(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: max(one.get(name, 0.0), other.get(name, 0.0)) for name in {*one, *other}}


def _requests(container: Mapping[str, Any]) -> dict[str, float]:
    resources = container.get("resources") or {}
    return _amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _amounts(quantities: Mapping[str, Any]) -> dict[str, float]:
    amounts: dict[str, float] = {}
    known = accelerators.resources()
    for name, amount in quantities.items():
        if amount is None:
            continue  # as the API server does
        if name in PLAIN:
            _add(amounts, {name: float(quantity(amount))})
        elif "/" in name and (name in known or name.endswith(KINDS)):
            _add(amounts, {"accelerator": float(quantity(amount))})
    return amounts


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, 0.0) + amount


def _ready(machine: Manifest) -> bool:
    """Return whether new pods can be placed on the machine."""
    if (machine.get("spec") or {}).get("unschedulable"):
        return False
    conditions = (machine.get("status") or {}).get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
