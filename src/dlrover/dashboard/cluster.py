"""The jobs of a cluster: those that Kubernetes and the Brain know, if they can be reached."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from dlrover.errors import DLRoverError
from dlrover.kubernetes.resources import names, times
from dlrover.rpc import wire
from dlrover.rpc.brain import BrainClient
from dlrover.spec.brain import Shape
from dlrover.spec.node import WORKER
from dlrover.spec.words import counted

if TYPE_CHECKING:
    from dlrover.dashboard.pods import PodJob, PodJobs

Source = Callable[[], Awaitable[list[dict[str, Any]]]]
PATIENCE = 5.0
"""Seconds that a source has to answer."""


class JobSources:
    """Sources of jobs by name; a source that cannot be reached gives its reason instead."""

    def __init__(self, sources: Mapping[str, Source], pods: PodJobs | None = None) -> None:
        self._sources = dict(sources)
        self._pods = pods

    async def rows(self) -> list[dict[str, Any]]:
        """Return what each source knows: ``name``, ``jobs``, and a ``problem`` if it cannot be reached."""
        return list(await asyncio.gather(*(_of(*pair) for pair in self._sources.items())))

    def find(self, job: str) -> PodJob | None:
        """Return the page of a job by the id in its row; None if there is none."""
        return None if self._pods is None else self._pods.find(job)


async def _of(name: str, source: Source) -> dict[str, Any]:
    try:
        return {"name": name, "jobs": await asyncio.wait_for(source(), PATIENCE), "problem": ""}
    except DLRoverError as error:
        return {"name": name, "jobs": [], "problem": str(error)}
    except asyncio.TimeoutError:
        return {"name": name, "jobs": [], "problem": f"No answer within {PATIENCE:g} s."}


def brain(address: str, token: str, tls: wire.Tls) -> Source:
    """Return the jobs in the Brain's history, the latest first."""

    async def ask() -> list[dict[str, Any]]:
        async with BrainClient(address, token, tls) as client:
            rows = await client.jobs()
        return [
            {
                "name": row.job,
                "phase": row.state,
                "size": _size(row.shape),
                "began": row.registered,
                "note": row.reason or (f"{row.throughput:.3g} samples/s" if row.throughput else ""),
            }
            for row in rows
        ]

    return ask


def _size(shape: Shape | None) -> str:
    groups = {} if shape is None else shape.groups
    return ", ".join(f"{group.count} {kind}" for kind, group in groups.items())


def kubernetes(kubeconfig: str, namespace: str) -> Source:
    """Return the ElasticJobs of a namespace, the latest first; an empty one stands for all namespaces."""
    from dlrover.kubernetes.api.client import ELASTIC_JOBS, Client  # noqa: PLC0415 - an extra

    async def ask() -> list[dict[str, Any]]:
        client = Client.from_config(kubeconfig or None)
        try:
            found, _ = await client.list(ELASTIC_JOBS, namespace or None)
        finally:
            await client.close()
        return sorted(map(_elastic_job, found), key=lambda row: -row["began"])

    return ask


def _elastic_job(job: Mapping[str, Any]) -> dict[str, Any]:
    status, replicas = job.get("status") or {}, dict(job["spec"].get("replicaSpecs") or {})
    replicas.pop(names.MASTER_ROLE, None)
    sizes = {role: spec.get("replicas", 1) for role, spec in replicas.items()}
    workers = [counted(sizes.pop(WORKER), "worker")] if WORKER in sizes else []
    size = ", ".join([*workers, *(f"{number} {role}" for role, number in sizes.items())])
    name = f"{job['metadata']['namespace']}/{job['metadata']['name']}"
    return {
        "id": name,
        "name": name,
        "phase": status.get("phase", "").lower(),
        "size": size,
        "began": times.read(job["metadata"].get("creationTimestamp", "")) or 0.0,
        "note": status.get("message", ""),
    }
