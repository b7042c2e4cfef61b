"""Accounting of the time of one round's workers; all members of a world share it.

Times are whole microseconds, so that parts add up exactly. Time since the last new step is *pending*: it
counts as what it seems to be until a new step confirms it or an interruption undoes it. While some of a world's
ranks do not train and the others go on, their share of the time in steps is degraded.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlrover.spec.activity import Activity
from dlrover.spec.outcome import CAUSES, Cause

MICRO = 1_000_000
"""Microseconds per second."""

INDEX = {cause: index for index, cause in enumerate(CAUSES)}
"""Index of each cause in a list of times."""
PRODUCTIVE = INDEX[Cause.PRODUCTIVE]
START_UP = INDEX[Cause.START_UP]
RECOMPUTED = INDEX[Cause.RECOMPUTED_STEPS]
DETECTION = INDEX[Cause.FAULT_DETECTION]
DEGRADED = INDEX[Cause.DEGRADED]
SHUTDOWN = INDEX[Cause.SHUTDOWN]
NOT_MEASURED = INDEX[Cause.NOT_MEASURED]

_CAUSE_OF = {
    Activity.START: START_UP,
    Activity.STEP: PRODUCTIVE,
    Activity.DATA: INDEX[Cause.DATA],
    Activity.COMPILE: INDEX[Cause.COMPILE],
    Activity.EVAL: INDEX[Cause.EVAL],
    Activity.CHECKPOINT: INDEX[Cause.CHECKPOINT_BLOCK],
}
_MOST_SECONDS = 1e12
"""Maximum seconds that a worker may claim; a larger, negative or NaN value counts as 0."""


def nothing() -> list[int]:
    """Return no time for any cause."""
    return [0] * len(CAUSES)


def add(sums: list[int], parts: Sequence[int], times: int = 1) -> None:
    """Add ``times`` times ``parts`` to ``sums``."""
    for index, part in enumerate(parts):
        if part:
            sums[index] += part * times


def microseconds(seconds: float) -> int:
    """Return a time in whole microseconds."""
    return round(seconds * MICRO)


class RoundTime:
    """Time of one node in the world of round ``number``, which was formed at ``now``.

    ``furthest`` is the number of the first step that no earlier round has made. ``reports_steps`` is True if the
    program is known to report its steps: until its first step, it is then starting. ``trained`` is True if an
    earlier round has made a step.
    """

    def __init__(
        self,
        number: int,
        now: int,
        furthest: int,
        *,
        reports_steps: bool = False,
        trained: bool = False,
    ) -> None:
        self.number = number
        self.since = now
        #: until when the time is split by cause
        self.settled = now
        #: until when a new step confirms the time; from there to ``settled`` it is pending
        self.proved = now
        #: steps that the round has completed
        self.steps = 0
        #: number of the step that it began with; -1 while unknown
        self.first_step = -1
        #: steps to make again before one is new
        self.redo = 0
        #: time until ``proved``, by cause
        self.spent = nothing()
        #: time from ``proved`` to ``settled``, by cause
        self.pending = nothing()
        #: True once a report has said what the workers do
        self.known = False
        self._furthest = furthest
        self._reports_steps = reports_steps
        self._trained = trained
        self._reported: tuple[int, ...] = (0,) * len(Activity)
        # age of the workers at ``settled``
        self._age = 0
        # ranks that do not train, of how many; since when; their share of the time from ``settled`` until then
        self._missing = 0, 1
        self._missing_since = now
        self._missed = 0

    @property
    def reports_steps(self) -> bool:
        """True if the program is known to report its steps."""
        return self._reports_steps or self.known or self.steps > 0

    @property
    def trained(self) -> bool:
        """True if this round or an earlier one has made a step."""
        return self._trained or self.steps > 0

    def lived(self, seconds: float) -> int:
        """Return when the workers ended, by their age in seconds at that time."""
        return self.settled + microseconds(min(seconds, _MOST_SECONDS)) - self._age

    def within(self, at: int, now: int) -> int:
        """Return ``at``, or the nearest time until ``now`` that a report can be about."""
        return min(max(at, self.settled, self._missing_since), now)

    def report(self, now: int, seconds: Sequence[float], steps: int, first_step: int) -> None:
        """Record what the workers have done until ``now``: seconds by `Activity`, steps, their first step."""
        if first_step >= 0 and self.first_step < 0:
            self.first_step = first_step
            self.redo = max(0, self._furthest - first_step)
        self._settle(now, seconds)
        if steps > self.steps:
            self._add_steps(self.pending, now - self.settled, now)
            self._settle_at(now)
            self._prove(steps)

    def miss(self, missing: int, ranks: int, now: int) -> None:
        """Note that ``missing`` of the ``ranks`` on the world's nodes do not train from now on."""
        self._missed = self._missed_until(now)
        self._missing_since, self._missing = now, (missing, max(1, ranks))

    def _missed_until(self, now: int) -> int:
        missing, ranks = self._missing
        return self._missed + (now - self._missing_since) * missing // ranks

    def _add_steps(self, sums: list[int], time: int, now: int) -> None:
        """Add ``time`` in steps since ``settled``: the share of ranks that did not train is degraded."""
        since = now - self.settled
        lost = time * self._missed_until(now) // since if since else 0
        sums[PRODUCTIVE] += time - lost
        sums[DEGRADED] += lost

    def _settle_at(self, now: int) -> None:
        self._age += now - self.settled
        self.settled = self._missing_since = now
        self._missed = 0

    def _settle(self, now: int, seconds: Sequence[float]) -> None:
        """Split the time since the last report by the workers' activities in it."""
        if len(seconds) != len(Activity):
            return
        reported = tuple(microseconds(s) if 0 <= s < _MOST_SECONDS else 0 for s in seconds)
        time = now - self.settled
        parts = [max(0, new - old) for new, old in zip(reported, self._reported, strict=True)]
        if not self.known:
            parts = self._first_parts(reported, now)
            self.known = True
        if total := sum(parts):
            reached = before = 0
            for activity in Activity:
                reached += parts[activity]
                share = time * reached // total
                if activity is Activity.STEP:
                    self._add_steps(self.pending, share - before, now)
                else:
                    self.pending[_CAUSE_OF[activity]] += share - before
                before = share
            self._settle_at(now)
            self._reported, self._age = reported, sum(reported)

    def _first_parts(self, reported: Sequence[int], now: int) -> list[int]:
        """Return what the first report of activities adds to the time that was split without one.

        The report counts from the start of the processes. An adopted round began later, so the time before it
        is taken off their first activity, the start.
        """
        parts = list(reported)
        parts[Activity.START] += (now - self.since) - sum(
            reported
        )  # time before the processes began
        for activity in Activity:
            cause = _CAUSE_OF[activity]
            booked = self.spent[cause] + self.pending[cause]
            if activity is Activity.STEP:
                booked += self.spent[RECOMPUTED] + self.spent[DEGRADED] + self.pending[DEGRADED]
            parts[activity] = max(0, parts[activity] - booked)
        return parts

    def _prove(self, steps: int) -> None:
        """Confirm the pending time by new steps; steps made before count as recomputed."""
        if not (self.known or self.steps):  # only the completion of the first steps is known
            self.pending[START_UP] += self.pending[PRODUCTIVE]
            self.pending[PRODUCTIVE] = 0
        made = steps - self.steps
        again = min(steps, self.redo) - min(self.steps, self.redo)
        redone = self.pending[PRODUCTIVE] * again // made
        self.pending[PRODUCTIVE] -= redone
        self.pending[RECOMPUTED] += redone
        add(self.spent, self.pending)
        self.pending = nothing()
        self.proved = self.settled
        self.steps = steps

    def so_far(self, now: int) -> list[int]:
        """Return a node's time since the world was formed, by cause, including pending time."""
        sums = self.unproved(now)
        add(sums, self.spent)
        return sums

    def unproved(self, now: int) -> list[int]:
        """Return a node's time since the last new step, by cause."""
        sums = list(self.pending)
        if self.steps:
            self._add_steps(sums, now - self.settled, now)
        else:
            sums[START_UP if self.reports_steps else NOT_MEASURED] += now - self.settled
        return sums

    def done(self, now: int) -> list[int]:
        """Return the time since the last new step for a node whose workers ended normally."""
        sums = self.unproved(now)
        if not self.trained:  # without any training, this was no start-up
            sums[NOT_MEASURED] += sums[START_UP]
            sums[START_UP] = 0
        if self.known:
            sums[SHUTDOWN] += sums[PRODUCTIVE]
            sums[PRODUCTIVE] = 0
        return sums

    def stopped(self, now: int) -> list[int]:
        """Return the time since the last new step for a node whose job is stopped: no step is made again."""
        sums = self.unproved(now)
        sums[SHUTDOWN] += sums[PRODUCTIVE]
        sums[PRODUCTIVE] = 0
        return sums

    def cut_off(self, now: int, detection: int) -> list[int]:
        """Return the time since the last new step, cut off by a fault that began ``detection`` earlier."""
        sums = self.unproved(now)
        left = detection
        for index in sorted(range(len(sums)), key=lambda i: i != PRODUCTIVE):
            taken = min(left, sums[index])
            sums[index] -= taken
            left -= taken
        sums[DETECTION] += detection - left
        if self.reports_steps:
            sums[RECOMPUTED] += sums[PRODUCTIVE]
            sums[PRODUCTIVE] = 0
        return sums
