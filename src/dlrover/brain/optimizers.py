"""Optimizers, which plan jobs. Others can be installed beside the built-in ones.

A package adds an optimizer by naming a class under the entry point group ``dlrover.brain.optimizers``. It
plans the jobs that name it in ``Description.optimizer``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from typing import Protocol

from dlrover.brain.machine.division import ClusterOptimizer
from dlrover.brain.machine.job import JobFacts, Past
from dlrover.brain.machine.single import SingleJobOptimizer
from dlrover.errors import ConfigurationError
from dlrover.spec import brain

GROUP = "dlrover.brain.optimizers"


class Optimizer(Protocol):
    """A planner of jobs. Each call gets all that is known; calls may come on any thread, one at a time."""

    whole: bool
    """True if it plans all jobs of its mode at once; else each call has one job."""

    def advise(
        self, jobs: Sequence[JobFacts], past: Past, cluster: brain.ClusterResources
    ) -> dict[str, brain.Advice]:
        """Return what each job should have next, by job id."""
        ...


class ManualOptimizer:
    """Optimizer that leaves every job as its user has sized it."""

    whole = False

    def advise(
        self, jobs: Sequence[JobFacts], past: Past, cluster: brain.ClusterResources
    ) -> dict[str, brain.Advice]:
        """Return no plan for any job."""
        del past, cluster
        reason = "optimizeMode is manual: the job keeps the size that its user gave it"
        return {job.id: brain.Advice(reason=reason) for job in jobs}


BUILT_IN: Mapping[str, type[Optimizer]] = {
    "manual": ManualOptimizer,
    "single-job": SingleJobOptimizer,
    "cluster": ClusterOptimizer,
}


class Optimizers:
    """The optimizers of one service, each created when a job first asks for it."""

    def __init__(self) -> None:
        self._made: dict[str, Optimizer] = {}
        self._installed = {entry.name: entry for entry in entry_points(group=GROUP)}

    def of(self, description: brain.Description) -> tuple[str, Optimizer]:
        """Return the name and the optimizer that plans a job.

        Raises:
            ConfigurationError: the job names one that is not installed, or that cannot be loaded.
        """
        name = description.optimizer or description.mode
        if description.mode == "manual":
            name = "manual"
        if name not in self._made:
            self._made[name] = self._make(name)
        return name, self._made[name]

    def _make(self, name: str) -> Optimizer:
        if name in BUILT_IN:
            return BUILT_IN[name]()
        if name not in self._installed:
            known = ", ".join(sorted({*BUILT_IN, *self._installed}))
            raise ConfigurationError(f"There is no optimizer {name}; installed are {known}.")
        try:
            made: Optimizer = self._installed[name].load()()
        except Exception as error:
            raise ConfigurationError(f"The optimizer {name} cannot be loaded: {error}.") from error
        return made
