"""What an operator counts of its own work. Its metrics are read from here when they are asked for."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets of a `Durations`, in seconds; one more has what is longer."""


class Durations:
    """How long something took: counts by bucket, and their sum in seconds."""

    def __init__(self) -> None:
        self.sum = 0.0
        self._counts = [0] * (len(BOUNDS) + 1)

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self._counts)

    def add(self, seconds: float) -> None:
        """One more."""
        self.sum += seconds
        self._counts[bisect_left(BOUNDS, seconds)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """How many took at most so long, by that bound; the last one is ``+Inf``."""
        bounds = [*(str(bound) for bound in BOUNDS), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


class Stats:
    """The counts of one operator process."""

    def __init__(self) -> None:
        self.reconciles = Durations()
        """From the look at a job until all that was decided has been done."""
        self.waits = Durations()
        """From the time that a job was to be looked at until it was."""
        self.failures = 0
        """Reconciles that could not be carried out."""
        self.calls: Counter[tuple[str, str]] = Counter()
        """Calls to the API server by method (``WATCH`` is one) and HTTP status."""
        self.leads = False

    def called(self, method: str, code: str) -> None:
        """A call to the API server has been answered; ``code`` is empty if no answer came."""
        self.calls[method, code] += 1
