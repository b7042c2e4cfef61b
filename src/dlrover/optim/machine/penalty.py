"""What each replica's pseudo-gradient counts at a sync (EDiT, arXiv:2412.07210, section on its penalty).

All replicas have the same reports, so all compute the same decision. The statistics are common to them: those of the
norms of replicas that counted, divided by the root of their steps, since a replica that made more steps has a larger
pseudo-gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from dlrover.errors import ConfigurationError

FLOOR = 0.05
"""Smallest standard deviation, as a part of the mean: norms that hardly vary are no reason to exclude one."""


@dataclass(frozen=True)
class Penalty:
    """Options of the penalty.

    Raises:
        ConfigurationError: an option is out of its range.
    """

    threshold: float = 3.0
    """Standard deviations above the mean of the norms beyond which a replica is left out; infinity: none is."""
    temperature: float = 1.0
    """T of the weights, softmax(-norm / T); infinity for equal weights."""
    smoothing: float = 0.02
    """Weight of the latest sync in mean and variance of the norms."""
    warmup: int = 20
    """Syncs whose norms are collected first. Until then a norm is compared with those of the other replicas."""
    peers: float = 10.0
    """Multiple of the (lower) median of the replicas' norms that is accepted during this time."""
    patience: int = 3
    """Consecutive syncs without a counted replica after which the statistics begin anew: the norms have a new level."""

    def __post_init__(self) -> None:
        for name in ("threshold", "temperature", "peers"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(
                    f"Penalty: {name} is {getattr(self, name)}; it must be more than 0."
                )
        if not 0 < self.smoothing < 1:
            raise ConfigurationError(
                f"Penalty: smoothing is {self.smoothing}; it must be between 0 and 1."
            )
        if self.warmup < 1 or self.patience < 1:
            raise ConfigurationError(
                f"Penalty: warmup is {self.warmup} and patience {self.patience}; they must be 1 or more."
            )


@dataclass(frozen=True)
class ReplicaReport:
    """What a replica says of itself at a sync."""

    norm: float
    """Norm of its pseudo-gradient; of what is not finite NaN or infinity."""
    steps: int
    """Its steps since its last sync."""


@dataclass(frozen=True)
class Statistics:
    """Mean and variance of norms, exponentially weighted and without bias towards their start."""

    syncs: int = 0
    mean: float = 0.0
    variance: float = 0.0
    refused: int = 0
    """Latest syncs in a row in which all that was finite was an anomaly."""

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Statistics:
        """Return the statistics whose fields, in order, are these numbers."""
        syncs, mean, variance, refused = numbers
        return cls(int(syncs), mean, variance, int(refused))

    def with_norms(self, norms: Sequence[float], smoothing: float) -> Statistics:
        """Return the statistics after a sync with these norms."""
        syncs = self.syncs + 1
        latest = smoothing / (1 - (1 - smoothing) ** syncs)
        mean = math.fsum(norms) / len(norms)
        variance = math.fsum((norm - mean) ** 2 for norm in norms) / len(norms)
        change = mean - self.mean
        return Statistics(
            syncs,
            self.mean + latest * change,
            (1 - latest) * self.variance + latest * variance + latest * (1 - latest) * change**2,
        )

    def limit(self, threshold: float) -> float:
        """Return the largest norm that counts: the mean plus a multiple of the standard deviation."""
        return self.mean + threshold * max(math.sqrt(self.variance), FLOOR * self.mean)


@dataclass(frozen=True)
class PenaltyDecision:
    """What the replicas of a sync count."""

    weights: tuple[float, ...]
    """Weight of each replica. Their sum is 1, or 0: then all return to the parameters of their last sync."""
    reasons: tuple[str, ...]
    """Why each replica is left out, half a sentence; empty for those that count."""
    statistics: Statistics


def judge(
    reports: Sequence[ReplicaReport | None], statistics: Statistics, penalty: Penalty | None
) -> PenaltyDecision:
    """Decide what each replica counts.

    Args:
        reports: the replicas' reports; None for one that joins at this sync and counts nothing.
        statistics: those before this sync.
        penalty: options; without them, all replicas that are finite count the same.
    """
    reasons = [_unfit(report) for report in reports]
    if penalty is None:
        return PenaltyDecision(_weights(reports, reasons, math.inf), tuple(reasons), statistics)
    finite = [not reason for reason in reasons]
    norms = [
        report.norm / math.sqrt(report.steps) if report is not None and fits else 0.0
        for report, fits in zip(reports, finite, strict=True)
    ]
    judged = _reasons(norms, reasons, statistics, penalty)
    if any(finite) and all(judged):
        statistics = replace(statistics, refused=statistics.refused + 1)
        if statistics.refused >= penalty.patience:
            statistics = Statistics()
            judged = _reasons(norms, reasons, statistics, penalty)
    counted = [norm for norm, reason in zip(norms, judged, strict=True) if not reason]
    if counted:
        statistics = statistics.with_norms(counted, penalty.smoothing)
    return PenaltyDecision(
        _weights(reports, judged, penalty.temperature), tuple(judged), statistics
    )


def _unfit(report: ReplicaReport | None) -> str:
    if report is None:
        return "it joins at this sync"
    return "" if math.isfinite(report.norm) else f"the norm of its change is {report.norm}"


def _reasons(
    norms: Sequence[float], reasons: Sequence[str], statistics: Statistics, penalty: Penalty
) -> list[str]:
    """Return the reasons, with those of norms that are too large; `norms` are per root of a step."""
    finite = [norm for norm, reason in zip(norms, reasons, strict=True) if not reason]
    if not finite or not math.isfinite(penalty.threshold):
        return list(reasons)
    if statistics.syncs >= penalty.warmup:
        limit, of = statistics.limit(penalty.threshold), "earlier syncs"
    else:
        limit, of = penalty.peers * median_low(finite), "the other replicas"
    limit = limit or math.inf  # before, nothing changed at all
    return [
        reason or (f"its norm {norm:.3g} is above {limit:.3g}, the limit by {of}" if norm > limit else "")
        for norm, reason in zip(norms, reasons, strict=True)
    ]  # fmt: skip


def _weights(
    reports: Sequence[ReplicaReport | None], reasons: Sequence[str], temperature: float
) -> tuple[float, ...]:
    """Return softmax(-norm / temperature) over the replicas that count; 0 for others."""
    norms = [
        None if report is None or reason else report.norm
        for report, reason in zip(reports, reasons, strict=True)
    ]
    counted = [norm for norm in norms if norm is not None]
    if not counted:
        return (0.0,) * len(norms)
    smallest = min(counted)
    shares = [0.0 if norm is None else math.exp((smallest - norm) / temperature) for norm in norms]
    return tuple(share / math.fsum(shares) for share in shares)
