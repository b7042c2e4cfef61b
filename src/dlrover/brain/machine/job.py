"""Input of the optimizers: the running jobs with their models, and the jobs that have ended."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

from dlrover.planning.plans import Terms
from dlrover.planning.shapes import Model, allowed, fitted, resized, total_batch, with_batch
from dlrover.planning.throughput import TrustRegion
from dlrover.planning.warmstart import PastJob
from dlrover.spec import brain
from dlrover.spec.measurements import Batches
from dlrover.spec.node import SERVER, Size
from dlrover.spec.plan import PlanOutcome

KEPT = 20_000
"""Maximum number of models kept; a model serves until its job has a new sample."""


@dataclass(frozen=True)
class JobFacts:
    """A running job, as far as the Brain knows it."""

    id: str
    description: brain.Description
    current: brain.Shape | None
    """Its present size; None if nothing runs yet."""
    samples: tuple[brain.Sample, ...]
    """Its latest samples, the oldest first."""
    outcomes: tuple[PlanOutcome, ...]
    """Outcomes of its plans that were measured, the oldest first."""
    done: float
    """Samples that it has processed so far; 0 if unknown."""
    version: int
    """A number that grows with each sample."""
    heard: float = 0.0
    """When it registered or reported its latest sample, in seconds since the epoch."""

    @property
    def batches(self) -> Batches | None:
        """The global batches that the job allows; None: each worker's batch stays."""
        return self.samples[-1].batches if self.samples else None

    @property
    def terms(self) -> Terms:
        """Limits of its next plan: wider after correct predictions, narrower after wrong ones."""
        region = TrustRegion()
        for outcome in self.outcomes:
            region = region.after(within=outcome.within)
        return Terms(region=region)

    def counts(self, kind: str) -> list[int]:
        """Return the node counts of a kind that it may have next: those near the measured ones."""
        space = self.description.space
        bounds = space.servers if kind == SERVER else space.workers
        shapes = [sample.shape for sample in self.samples]
        shapes += [self.current] if self.current is not None else []
        known = [shape.groups[kind].count for shape in shapes if kind in shape.groups]
        if not known:
            return allowed(bounds)
        factor = self.terms.region.factor
        least = max(bounds.least, min(min(known) - 1, math.ceil(min(known) / factor)))
        most = min(bounds.most, max(max(known) + 1, math.floor(max(known) * factor)))
        return allowed(msgspec.structs.replace(bounds, least=least, most=most))

    def resized(self, current: brain.Shape, size: Size) -> brain.Shape:
        """Return ``current`` with other numbers of the same nodes; a global batch that it allows stays."""
        shape = resized(current, size.workers, size.servers or None)
        if self.batches is None:
            return shape
        return with_batch(shape, total_batch(current), self.batches.pass_most)


@dataclass(frozen=True)
class Past:
    """Jobs that have ended successfully."""

    jobs: tuple[PastJob, ...]
    """The jobs, with the largest memory that any of their nodes has used."""
    done: tuple[float, ...]
    """Samples that each job has processed; 0 if unknown."""
    tenants: tuple[str, ...] = ()
    """Tenant of each job; empty: all jobs belong to one tenant."""

    def of(self, job: str) -> Past:
        """Return the past jobs of the tenant that owns ``job``."""
        if not self.tenants:
            return self
        own = [index for index, one in enumerate(self.tenants) if one == tenant_of(job)]
        return Past(tuple(self.jobs[n] for n in own), tuple(self.done[n] for n in own))


class Models:
    """Fitted models of jobs, each kept until its job has a new sample."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, Model]] = {}

    def of(self, job: JobFacts) -> Model | None:
        """Return the model of a job; None if it has no samples."""
        version, model = self._kept.get(job.id, (0, None))
        if model is not None and version == job.version:
            return model
        if not job.samples:
            return None
        model = fitted(job.samples, job.description.strategy)
        if len(self._kept) >= KEPT:
            self._kept.clear()
        self._kept[job.id] = (job.version, model)
        return model


def tenant_of(job: str) -> str:
    """Return the tenant of a job by its id in the database; empty if it has none."""
    return job.rpartition(" ")[0]
