"""How much memory a node will need, and what to do before it runs out of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dlrover.errors import ConfigurationError

DEVIATIONS = 2.0
"""Standard deviations above the line that a forecast reaches."""
TREND = 3.0
"""Minimum ratio of a slope to its own error at which it counts as growth."""
LEAST_SAMPLES = 4
"""Minimum number of samples that can show a trend."""
MARGIN = 0.2
"""Share of the forecast added to what is ordered: allocators and page caches take some."""
GIB = 1 << 30
"""Bytes of a GiB."""


@dataclass(frozen=True)
class MemorySample:
    """The memory of a node at one moment."""

    progress: float
    """Finished share of the job, 0 to 1; or seconds, if the end is given in seconds."""
    used: int
    """Memory in use, in bytes."""


@dataclass(frozen=True)
class Forecast:
    """Memory that a node will need, in bytes."""

    expected: int
    """Expected need at the requested end."""
    high: int
    """Upper bound of the need, ``DEVIATIONS`` above the line; at least what has been used."""
    slope: float
    """Bytes per unit of progress; 0 if no growth is seen."""


@dataclass(frozen=True)
class MemoryAdvice:
    """Memory that a node should have, with the reason."""

    memory: int
    """Memory in bytes."""
    more_nodes: bool
    """True if the model should be divided among more nodes instead: no node can have enough memory."""
    reason: str
    needed: int
    """Maximum expected need in bytes."""


def forecast(samples: Sequence[MemorySample], end: float = 1.0) -> Forecast:
    """Extend the growth of a node's memory to ``end``.

    Fits a line to the samples, as DLRover-RM does for the servers of growing embeddings (VLDB 2024).
    Without a clear slope, the highest use is the forecast: the memory of workers goes up and down.

    Raises:
        ConfigurationError: There is no sample.
    """
    if not samples:
        raise ConfigurationError("samples is empty: a forecast needs at least one")
    highest = max(sample.used for sample in samples)
    line = _line(samples)
    if line is None:
        return Forecast(highest, highest, 0.0)
    slope, centre, mean, deviation, error = line
    away = end - centre
    expected = mean + slope * away
    high = expected + DEVIATIONS * math.sqrt(
        deviation**2 * (1 + 1 / len(samples)) + (error * away) ** 2
    )
    return Forecast(max(highest, round(expected)), max(highest, round(high)), slope)


def exhausted_at(samples: Sequence[MemorySample], limit: int) -> float | None:
    """Return the progress at which the memory reaches ``limit`` bytes; None if it does not grow."""
    line = _line(samples)
    if line is None:
        return None
    slope, centre, mean, _, _ = line
    return max(samples[-1].progress, centre + (limit - mean) / slope)


def prevent_oom(
    node: str, samples: Sequence[MemorySample], limit: int, most: int, end: float = 1.0
) -> MemoryAdvice | None:
    """Advise more memory for a node that will run out of it; return None if it will not.

    Args:
        node: The node's name, for the reason.
        samples: Samples since the node started.
        limit: Bytes that the node has.
        most: Maximum bytes that a node can have.
        end: Progress up to which the memory must last.
    """
    if not samples:
        return None
    need = forecast(samples, end)
    if need.high <= limit:
        return None
    wanted = _with_margin(need.high)
    when = exhausted_at(samples, limit)
    growth = "" if when is None else f", which it reaches at progress {when:.2f}"
    why = f"{node} is expected to need {_gib(need.high)} of its {_gib(limit)}{growth}"
    if wanted > most:
        divided = f"{why}: more than a node can have, so the model is divided"
        return MemoryAdvice(most, True, divided, need.high)
    return MemoryAdvice(wanted, False, why, need.high)


def _line(samples: Sequence[MemorySample]) -> tuple[float, float, float, float, float] | None:
    """Return slope, centre, mean there, deviation from the line, error of the slope; None without growth."""
    count = len(samples)
    if count < LEAST_SAMPLES:
        return None
    centre = sum(s.progress for s in samples) / count
    mean = sum(s.used for s in samples) / count
    width = sum((s.progress - centre) ** 2 for s in samples)
    if width <= 0:
        return None
    slope = sum((s.progress - centre) * (s.used - mean) for s in samples) / width
    rest = sum((s.used - mean - slope * (s.progress - centre)) ** 2 for s in samples)
    deviation = math.sqrt(rest / (count - 2))
    error = deviation / math.sqrt(width)
    if slope <= TREND * error:
        return None
    return slope, centre, mean, deviation, error


def _with_margin(used: int) -> int:
    """Return a need plus the margin, rounded up to a quarter of a GiB."""
    step = GIB // 4
    return math.ceil(used * (1 + MARGIN) / step) * step


def _gib(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB"
