"""An operator's counts of its own work, from which its metrics are read on request."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds in seconds of the buckets of `Durations`; one more bucket holds longer durations."""


class Durations:
    """A histogram of durations: counts by bucket, and the sum in seconds."""

    def __init__(self) -> None:
        self.sum = 0.0
        self._counts = [0] * (len(BOUNDS) + 1)

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self.sum += seconds
        self._counts[bisect_left(BOUNDS, seconds)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative count for each upper bound; the last bound is ``+Inf``."""
        bounds = [*(str(bound) for bound in BOUNDS), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


class Stats:
    """The counts of one operator process."""

    def __init__(self) -> None:
        self.reconciles = Durations()
        """Time from the start of processing a job until its decision is carried out."""
        self.waits = Durations()
        """Time from a job's due time until its processing starts."""
        self.failures = 0
        """Reconciliations that could not be carried out."""
        self.calls: Counter[tuple[str, str]] = Counter()
        """Calls to the API server by method (including ``WATCH``) and HTTP status."""
        self.leads = False

    def called(self, method: str, code: str) -> None:
        """Count an attempt at a call to the API server; ``code`` is empty without a response."""
        self.calls[method, code] += 1
