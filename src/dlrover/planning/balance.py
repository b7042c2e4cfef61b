"""Advice on hot parameter servers, and batch shares by the speed of workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from dlrover.errors import ConfigurationError

HOT = 0.8
"""Median share of its cores in the last samples above which a server is hot."""
WINDOW = 3
"""Number of last samples that count."""
UNEVEN = 1.3
"""Ratio of the busiest server's load to the mean above which servers are unbalanced."""
WORTH = 0.05
"""Minimum gain of a split by speed; below it, shares of the batch stay equal."""


@dataclass(frozen=True)
class ServerLoad:
    """Recent CPU load of a server."""

    name: str
    cpu: float
    """Cores that the server has."""
    used: Sequence[float]
    """Cores that the server used, the latest sample last."""

    @property
    def level(self) -> float:
        """Cores in use: the median of the last samples."""
        return median(self.used[-WINDOW:])


@dataclass(frozen=True)
class ServerAdvice:
    """Advice on hot servers; at most one of the two measures is advised."""

    migrate: Mapping[str, float]
    """Cores that each hot server needs, on a new node beside it."""
    more: bool
    """True if the job needs more servers, or more cores per server."""
    reason: str


def advise_servers(loads: Sequence[ServerLoad], most_cpu: float) -> ServerAdvice:
    """Return advice on hot servers.

    Args:
        loads: All servers; those with fewer than three samples are left out.
        most_cpu: Cores that a node can have.
    """
    known = [load for load in loads if len(load.used) >= WINDOW]
    hot = [load for load in known if load.level > HOT * load.cpu]
    if not known:
        return ServerAdvice({}, more=False, reason="no server has enough samples")
    if not hot:
        return ServerAdvice({}, more=False, reason="no server is hot")
    if len(hot) == len(known):
        reason = f"all {len(hot)} servers use more than {HOT:.0%} of their cores"
        return ServerAdvice({}, more=True, reason=reason)
    wanted = {load.name: min(most_cpu, math.ceil(load.level / HOT)) for load in hot}
    migrate = {load.name: wanted[load.name] for load in hot if wanted[load.name] > load.cpu}
    names = ", ".join(f"{load.name} ({load.level / load.cpu:.0%} of its cores)" for load in hot)
    what = "the others are not" if migrate else "no node has more, so more servers are needed"
    reason = f"hot: {names}; {what}"
    return ServerAdvice(migrate, more=not migrate, reason=reason)


@dataclass(frozen=True)
class Split:
    """Division of a step's samples among the workers."""

    shares: Mapping[str, int]
    gain: float
    """Relative reduction of the step time against equal shares, 0 to 1."""
    reason: str


def split_batch(batch: int, seconds_per_sample: Mapping[str, float], least: int = 1) -> Split:
    """Divide a batch so that all workers need the same time.

    The shares are whole numbers with the sum ``batch``. Each next sample goes to the worker that would finish
    it first, which makes the slowest worker as fast as whole samples allow.

    Args:
        batch: Samples of a step of all workers.
        seconds_per_sample: Seconds per sample of each worker.
        least: Minimum number of samples of each worker.

    Raises:
        ConfigurationError: There is no worker, the batch is too small, or a time is not above 0.
    """
    _check(batch, seconds_per_sample, least)
    names = sorted(seconds_per_sample)
    equal = {n: batch // len(names) + (i < batch % len(names)) for i, n in enumerate(names)}
    shares = _by_speed(batch, seconds_per_sample, least)
    before, after = (
        max(share * seconds_per_sample[n] for n, share in split.items())
        for split in (equal, shares)
    )
    gain = 1 - after / before
    slowest = max(names, key=lambda name: seconds_per_sample[name])
    if gain < WORTH:
        return Split(
            equal, 0.0, f"equal shares: a split by speed gains {max(gain, 0.0):.1%} of a step"
        )
    return Split(
        shares,
        gain,
        f"{slowest} is the slowest and takes {shares[slowest]} of {batch} samples instead of "
        f"{equal[slowest]}: steps get {gain:.0%} shorter than with equal shares",
    )


def _by_speed(batch: int, seconds: Mapping[str, float], least: int) -> dict[str, int]:
    rate = sum(1 / each for each in seconds.values())
    shares = {name: max(least, math.floor(batch / each / rate)) for name, each in seconds.items()}
    while sum(shares.values()) > batch:
        name = max((n for n in shares if shares[n] > least), key=lambda n: shares[n] * seconds[n])
        shares[name] -= 1
    while sum(shares.values()) < batch:
        shares[min(shares, key=lambda n: (shares[n] + 1) * seconds[n])] += 1
    return shares


def _check(batch: int, seconds: Mapping[str, float], least: int) -> None:
    if not seconds:
        raise ConfigurationError("seconds_per_sample is empty: it must have at least one worker")
    if batch < least * len(seconds):
        raise ConfigurationError(
            f"batch is {batch}: {len(seconds)} workers need {least * len(seconds)} samples at least"
        )
    for name, each in seconds.items():
        if not (each > 0 and math.isfinite(each)):
            raise ConfigurationError(
                f"seconds_per_sample of {name} is {each}: it must be a positive number"
            )
