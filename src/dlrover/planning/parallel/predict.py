"""Memory and step time of strategies. Needs numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dlrover.planning.parallel.accelerators import accelerator
from dlrover.planning.parallel.columns import Columns
from dlrover.planning.parallel.memory import GIB, MemoryUse, interval, memory
from dlrover.planning.parallel.records import Cluster, Prediction, Strategy, Transformer
from dlrover.planning.parallel.residuals import factors
from dlrover.planning.parallel.rules import PlannedJob, first_broken
from dlrover.planning.parallel.timing import timed

CONTEXT = 1.2
"""GiB of a device that the driver and the communication library take beside the allocator."""


@dataclass(frozen=True)
class Predicted:
    """Predictions of many strategies."""

    job: PlannedJob
    of: Columns
    memory: MemoryUse
    seconds: Any

    @property
    def usable(self) -> float:
        """GiB that a program can reserve on one device."""
        return accelerator(self.job.cluster.accelerator).memory_gib - CONTEXT

    @property
    def fits(self) -> Any:
        """Which strategies need no more memory than there is, with the whole interval."""
        return interval(self.memory, self.of)[1] / GIB <= self.usable

    def one(self, index: int, broken: str = "") -> Prediction:
        """Return one prediction; ``broken`` is the rule that its strategy breaks."""
        low, high = (float(bound[index]) / GIB for bound in interval(self.memory, self.of))
        parts = {name: float(getattr(self.memory, name)[index]) / GIB for name in MemoryUse.PARTS}
        stage, seconds = int(self.memory.stage[index]), float(self.seconds[index])
        total = sum(parts.values())
        reason = broken or ("" if high <= self.usable else self._excess(stage, total, high, parts))
        job = self.job
        spread = job.cluster.spread or accelerator(job.cluster.accelerator).spread
        return Prediction(
            memory_gib=total,
            memory_low=low,
            memory_high=high,
            step_seconds=seconds,
            tokens_per_second=job.global_batch * job.sequence / (seconds * job.cluster.size),
            fits=not reason,
            reason=reason,
            active_gib=float(self.memory.active[index]) / GIB,
            step_low=seconds / (1 + spread),
            step_high=seconds * (1 + spread),
            stage=stage,
            parts=parts,
        )

    def _excess(self, stage: int, total: float, high: float, parts: dict[str, float]) -> str:
        most = sorted(parts.items(), key=lambda part: -part[1])[:3]
        named = ", ".join(f"{size:.1f} {name}" for name, size in most)
        return (
            f"stage {stage} needs {total:.1f} GiB, up to {high:.1f}, of {self.usable:.1f}: {named}."
        )


def predict_all(job: PlannedJob, of: Columns) -> Predicted:
    """Return the predictions of many strategies, whether they obey the rules or not."""
    model, cluster = job.model, job.cluster
    needed = memory(model, of, job.sequence, job.global_batch)
    time = timed(model, of, cluster, job.sequence, job.global_batch)
    return Predicted(job, of, needed, time.seconds * factors(of, cluster))


def predict(
    model: Transformer, strategy: Strategy, cluster: Cluster, *, sequence: int, global_batch: int
) -> Prediction:
    """Return the memory and the step time of a strategy.

    Args:
        model: The model's shape.
        strategy: The strategy in question.
        cluster: The accelerators that run it.
        sequence: Tokens of a sequence.
        global_batch: Sequences of a step, on all ranks together.

    Raises:
        ConfigurationError: the accelerator is unknown, or a number is not positive.
    """
    job = PlannedJob(model, cluster, sequence, global_batch)
    return predict_all(job, Columns.of([strategy])).one(0, first_broken(job, strategy))
