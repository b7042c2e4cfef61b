"""Where the time of one round's workers goes. All members of a world share the answer.

Times are whole microseconds, so that parts add up to the whole exactly. What was done since the last new
step is *pending*: it counts as what it looks like until a new step proves it or an interruption undoes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlrover.spec.activities import Activity
from dlrover.spec.goodput import CAUSES, Cause

MICRO = 1_000_000
"""Microseconds of a second."""

INDEX = {cause: index for index, cause in enumerate(CAUSES)}
"""The place of each cause in a list of times."""
PRODUCTIVE = INDEX[Cause.PRODUCTIVE]
START_UP = INDEX[Cause.START_UP]
RECOMPUTED = INDEX[Cause.RECOMPUTED_STEPS]
DETECTION = INDEX[Cause.FAULT_DETECTION]
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
"""What a worker claims beyond is no time; so is what is negative or not a number."""


def nothing() -> list[int]:
    """No time for any cause."""
    return [0] * len(CAUSES)


def add(sums: list[int], parts: Sequence[int], times: int = 1) -> None:
    """Add ``times`` as much as ``parts`` to ``sums``."""
    for index, part in enumerate(parts):
        if part:
            sums[index] += part * times


def microseconds(seconds: float) -> int:
    """A time in whole microseconds."""
    return round(seconds * MICRO)


class RoundTime:
    """The time of one node in the world of round ``number``, which was formed at ``now``.

    ``furthest`` is the number of the first step that no earlier round has made, ``tells`` whether the
    program is known to tell of its steps: without one it is then still starting. ``trained`` is whether
    an earlier round has made any.
    """

    def __init__(
        self, number: int, now: int, furthest: int, *, tells: bool = False, trained: bool = False
    ) -> None:
        self.number = number
        self.since = now
        #: until when the time is split; what comes after is not yet
        self.settled = now
        #: until when it is proved by a new step; from there to ``settled`` it is pending
        self.proved = now
        #: steps that the round has completed
        self.steps = 0
        #: number of the step that it began with, -1 while that is not known
        self.first_step = -1
        #: steps to be made before one is new
        self.redo = 0
        #: by cause, until ``proved``
        self.spent = nothing()
        #: by cause, from ``proved`` to ``settled``
        self.pending = nothing()
        #: whether a report told what the workers do
        self.known = False
        self._furthest = furthest
        self._tells = tells
        self._trained = trained
        self._told: tuple[int, ...] = (0,) * len(Activity)

    @property
    def tells(self) -> bool:
        """Whether the program tells of its steps, as far as is known by now."""
        return self._tells or self.known or self.steps > 0

    @property
    def trained(self) -> bool:
        """Whether this round or an earlier one has made a step."""
        return self._trained or self.steps > 0

    def report(self, now: int, seconds: Sequence[float], steps: int, first_step: int) -> None:
        """Take in what the workers have done so far: seconds by `Activity`, steps, their first one."""
        if first_step >= 0 and self.first_step < 0:
            self.first_step = first_step
            self.redo = max(0, self._furthest - first_step)
        self._settle(now, seconds)
        if steps > self.steps:
            self.pending[PRODUCTIVE] += now - self.settled
            self.settled = now
            self._prove(steps)

    def _settle(self, now: int, seconds: Sequence[float]) -> None:
        """Split the time since the last report by what the workers did meanwhile."""
        if len(seconds) != len(Activity):
            return
        told = tuple(microseconds(s) if 0 <= s < _MOST_SECONDS else 0 for s in seconds)
        time = now - self.settled
        parts = [max(0, new - old) for new, old in zip(told, self._told, strict=True)]
        if not self.known:
            parts = self._first_parts(told, now)
            self.known = True
        if total := sum(parts):
            reached = before = 0
            for activity in Activity:
                reached += parts[activity]
                share = time * reached // total
                self.pending[_CAUSE_OF[activity]] += share - before
                before = share
            self.settled = now
            self._told = told

    def _first_parts(self, told: Sequence[int], now: int) -> list[int]:
        """What the first report of activities adds to the time that was split without one.

        The report counts from the start of the processes. A round that was adopted began later: what
        the processes did first, starting, came before it.
        """
        parts = list(told)
        parts[Activity.START] += (now - self.since) - sum(told)  # before the processes began
        for activity in Activity:
            cause = _CAUSE_OF[activity]
            booked = self.spent[cause] + self.pending[cause]
            if activity is Activity.STEP:
                booked += self.spent[RECOMPUTED]
            parts[activity] = max(0, parts[activity] - booked)
        return parts

    def _prove(self, steps: int) -> None:
        """New steps: what was pending counts; steps that were made before count as made again."""
        if not (self.known or self.steps):  # all that is known is when the first step was there
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
        """What a node's time since the completion of the world looks like, by cause."""
        sums = self.unproved(now)
        add(sums, self.spent)
        return sums

    def unproved(self, now: int) -> list[int]:
        """The same for the time since the last new step."""
        sums = list(self.pending)
        cause = PRODUCTIVE if self.steps else START_UP if self.tells else NOT_MEASURED
        sums[cause] += now - self.settled
        return sums

    def done(self, now: int) -> list[int]:
        """The time since the last new step of a node whose workers have ended as they should."""
        sums = self.unproved(now)
        if not self.trained:  # there was no training that it could have been starting
            sums[NOT_MEASURED] += sums[START_UP]
            sums[START_UP] = 0
        if self.known:
            sums[SHUTDOWN] += sums[PRODUCTIVE]
            sums[PRODUCTIVE] = 0
        return sums

    def stopped(self, now: int) -> list[int]:
        """The same for a node whose job somebody ends: nothing is made again."""
        sums = self.unproved(now)
        sums[SHUTDOWN] += sums[PRODUCTIVE]
        sums[PRODUCTIVE] = 0
        return sums

    def cut_off(self, now: int, detection: int) -> list[int]:
        """The same for a node that is interrupted, by a fault that began ``detection`` before."""
        sums = self.unproved(now)
        left = detection
        for index in sorted(range(len(sums)), key=lambda i: i != PRODUCTIVE):
            taken = min(left, sums[index])
            sums[index] -= taken
            left -= taken
        sums[DETECTION] += detection - left
        if self.tells:
            sums[RECOMPUTED] += sums[PRODUCTIVE]
            sums[PRODUCTIVE] = 0
        return sums
