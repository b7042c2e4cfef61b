"""Expected goodput of a job whose machines fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DAY = 86_400.0
"""Seconds of a day."""


@dataclass(frozen=True)
class Fleet:
    """The machines of a job."""

    nodes: int
    failures_per_node_day: float

    @property
    def mean_time_to_failure(self) -> float:
        """Mean seconds until one of the nodes fails."""
        return DAY / (self.nodes * self.failures_per_node_day)


def expected_ratio(fleet: Fleet, *, restart: float, queue: float, interval: float) -> float:
    """Return the share of its time that a job spends in steps it does not have to repeat.

    To first order, for failures that come alone: each costs the restart, the wait for a node, and half
    an interval of repeated steps. The form is that of "Revisiting Reliability in Large-Scale Machine
    Learning Research Clusters" (HPCA 2025).

    Args:
        fleet: The machines.
        restart: Seconds from a failure to training again, with nodes at hand.
        queue: Seconds until nodes are available.
        interval: Seconds between two checkpoints.
    """
    return max(0.0, 1 - (restart + queue + interval / 2) / fleet.mean_time_to_failure)


def failures_in(pool: Sequence[int], unit: int) -> int:
    """Return how often units of a pool came or went, given its sizes at successive moments.

    The pool begins empty. A job that is spread over all of it is interrupted each time.
    """
    before = [0, *pool[:-1]]
    return sum(abs(now - then) // unit for now, then in zip(pool, before, strict=True))


def steps_per_second(
    *, throughput: float, failures: int, seconds: float, redone: float, load: float
) -> float:
    """Return the useful steps per second of an interrupted job. The form is PCcheck's (ASPLOS 2025).

    Args:
        throughput: Steps per second while the job trains and saves checkpoints.
        failures: Number of interruptions.
        seconds: Run time in seconds.
        redone: Seconds of steps that are repeated after each failure.
        load: Seconds to load a checkpoint.
    """
    return throughput * max(0.0, 1 - failures * (redone + load) / seconds)
