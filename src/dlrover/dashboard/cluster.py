"""The jobs of a cluster: those that Kubernetes and the Brain know, if they can be reached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dlrover.dashboard.ended import EndedJob
from dlrover.dashboard.feed import SHARE
from dlrover.dashboard.listing import MOST
from dlrover.errors import DLRoverError, ExitCode
from dlrover.kubernetes.machine.decisions import status_of
from dlrover.kubernetes.machine.pods import exit_code_of
from dlrover.kubernetes.resources import names, times
from dlrover.spec.node import WORKER
from dlrover.spec.words import counted

if TYPE_CHECKING:
    from dlrover.dashboard.history import BrainJob, BrainJobs
    from dlrover.dashboard.pods import PodJob, PodJobs

Source = Callable[[int], Awaitable[list[dict[str, Any]]]]
"""Returns rows of jobs; the latest are shown. It takes the number of rows to show, and may return more."""
PATIENCE = 5.0
"""Seconds that a source has to answer."""


class JobSources:
    """Sources of jobs by name; a source that cannot be reached gives its reason instead.

    At most ``most`` jobs of a source are in the list: those that have not ended, then the latest.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        pods: PodJobs | None = None,
        brain: BrainJobs | None = None,
        most: int = MOST,
    ) -> None:
        self._sources = dict(sources)
        self._most = most
        self._places = [place for place in (brain, pods) if place is not None]
        self._known: dict[str, tuple[float, dict[str, Any]]] = {}

    async def rows(self) -> list[dict[str, Any]]:
        """Return what each source knows: ``name``, ``jobs``, ``more``, and a ``problem`` if it cannot be reached."""
        return list(await asyncio.gather(*map(self._of, self._sources)))

    def find(self, job: str) -> PodJob | BrainJob | None:
        """Return the page of a job by the id in its row; None if there is none."""
        return next((page for place in self._places if (page := place.find(job))), None)

    async def _of(self, name: str) -> dict[str, Any]:
        """Return a source's answer; one that took long is kept for a while, as a list of thousands of jobs."""
        until, answer = self._known.get(name, (0.0, {}))
        began = time.monotonic()
        if began >= until:
            answer = await _ask(name, self._sources[name], self._most)
            self._known[name] = (began + (time.monotonic() - began) / SHARE, answer)
        return answer


async def _ask(name: str, source: Source, most: int) -> dict[str, Any]:
    rows, problem = [], ""
    try:
        rows = await asyncio.wait_for(source(most + 1), PATIENCE)
    except DLRoverError as error:
        problem = str(error)
    except asyncio.TimeoutError:
        problem = f"No answer within {PATIENCE:g} s."
    return {
        "name": name,
        "jobs": latest(rows, most),
        "more": len(rows) > most,
        "problem": problem,
    }


def latest(rows: Sequence[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Return the jobs that have not ended and the latest others, the latest first."""
    kept = sorted(rows, key=lambda row: (row["over"], -row["began"]))[:most]
    return sorted(kept, key=lambda row: -row["began"])


def kubernetes(kubeconfig: str, namespace: str) -> Source:
    """Return the ElasticJobs of a namespace; an empty one stands for all namespaces."""
    from dlrover.kubernetes.api.client import ELASTIC_JOBS, Client  # noqa: PLC0415 - an extra

    async def ask(_most: int) -> list[dict[str, Any]]:
        async with Client.from_config(kubeconfig) as client:
            found, _ = await client.list(ELASTIC_JOBS, namespace or None)
        return list(map(_row, found))

    return ask


def _row(job: Mapping[str, Any]) -> dict[str, Any]:
    status = job.get("status") or {}
    training = status.get("training") or {}
    name = f"{job['metadata']['namespace']}/{job['metadata']['name']}"
    began = _began(job)
    over = times.read(status.get("completionTime") or "")
    return {
        "id": name,
        "name": name,
        "phase": (status.get("phase") or "").lower(),
        "size": _size(job["spec"]),
        "began": began,
        "seconds": None if over is None else over - began,
        "steps": training.get("steps"),
        "goodput": _ratio(training.get("goodput") or ""),
        "over": over is not None,
        "note": status.get("message", ""),
    }


def ended_job(job: Mapping[str, Any]) -> EndedJob | None:
    """Return what an ElasticJob keeps after its end; None if it has not ended."""
    status, spec = status_of(job), job["spec"]
    over = times.read(status.completion_time)
    if over is None:
        return None
    ends = [one for one in status.conditions if one.type == status.phase]
    said = [end.message for end in ends if end.message]  # the status's own may be of a later change
    ended_well = status.phase == "Succeeded"
    return EndedJob(
        name=job["metadata"]["name"],
        phase=status.phase.lower(),
        began=_began(job),
        ended=over,
        exit_code=ExitCode.SUCCESS if ended_well else exit_code_of(end.reason for end in ends),
        reason=said[0] if said else status.message,
        size=_size(msgspec.json.decode(status.running_spec) if status.running_spec else spec),
        steps=status.training.steps,
        restarts=status.training.restarts,
        goodput=_ratio(status.training.goodput),
        journal_claim=(spec.get("master") or {}).get("journalClaim", ""),
    )


def _began(job: Mapping[str, Any]) -> float:
    status, created = job.get("status") or {}, job["metadata"].get("creationTimestamp", "")
    return times.read(status.get("startTime") or "") or times.read(created) or 0.0


def _ratio(percent: str) -> float | None:
    """Return the goodput that a status has as ``97.5%``."""
    try:
        return float(percent.removesuffix("%")) / 100
    except ValueError:
        return None


def _size(spec: Mapping[str, Any]) -> str:
    replicas = dict(spec.get("replicaSpecs") or {})
    replicas.pop(names.MASTER_ROLE, None)
    sizes = {role: spec.get("replicas", 1) for role, spec in replicas.items()}
    workers = [counted(sizes.pop(WORKER), "worker")] if WORKER in sizes else []
    return ", ".join([*workers, *(f"{number} {role}" for role, number in sizes.items())])
