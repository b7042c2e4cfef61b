"""The worker's tracker: hooks report its activity, and the progress board shows it.

Only the training thread counts: the main thread, or the one that made the first optimizer step. The
training does not wait for separate processes or threads of a data loader or a checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from dlrover.spec.activity import Activity
from dlrover.training.worker.progress import Board

_INTERRUPTIONS: dict[int, frozenset[int]] = {
    Activity.START: frozenset({Activity.COMPILE}),
    Activity.STEP: frozenset({Activity.DATA, Activity.COMPILE, Activity.EVAL, Activity.CHECKPOINT}),
    Activity.EVAL: frozenset({Activity.COMPILE, Activity.CHECKPOINT}),
    Activity.DATA: frozenset(),
    Activity.COMPILE: frozenset(),
    Activity.CHECKPOINT: frozenset(),
}
"""Activities that may interrupt each activity; any other counts as part of it: data of an evaluation, say."""

Hook = TypeVar("Hook", bound=Callable[..., object])


class Tracker:
    """The activity of one worker; all times are monotonic nanoseconds."""

    def __init__(self, board: Board, slot: int) -> None:
        self._board = board
        self._slot = slot
        self._thread = threading.get_ident()
        self._doing: int = Activity.START
        self._since = time.monotonic_ns()
        self._totals = [0] * len(Activity)
        self.steps = 0
        self.evaluating = False
        board.begin(slot, self._since)
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        """Stop tracking in a forked child: it is not the worker."""
        self._thread = 0

    @property
    def apart(self) -> int:
        """Nanoseconds spent neither on steps nor on waiting for their data."""
        totals = self._totals
        return (
            totals[Activity.START]
            + totals[Activity.COMPILE]
            + totals[Activity.EVAL]
            + totals[Activity.CHECKPOINT]
        )

    def step(self, now: int) -> bool:
        """Count an optimizer step that ended at ``now``; return True if it counts."""
        if threading.get_ident() != self._thread:
            if self.steps or not self._thread:
                return False
            self._thread = threading.get_ident()
        self.evaluating = False
        self._change(Activity.STEP, now)
        self.steps = self._board.count_step(self._slot)
        return True

    def alive(self, now: int) -> None:
        """Begin to wait for the next step anew: the training goes on, though nothing counts yet."""
        if threading.get_ident() == self._thread and self._doing == Activity.STEP:
            self._change(Activity.STEP, now)

    def begin(self, activity: int) -> int | None:
        """Begin an activity, unless it belongs to the current one; return the value for `end`."""
        before = self._doing
        if threading.get_ident() != self._thread or activity not in _INTERRUPTIONS[before]:
            return None
        self._change(activity, time.monotonic_ns())
        return before

    def end(self, before: int | None) -> None:
        """End an activity, with the value that `begin` returned."""
        if before is not None and threading.get_ident() == self._thread:
            self._change(before, time.monotonic_ns())

    def evaluate(self) -> None:
        """Begin an evaluation; `train` or the next step ends it."""
        self.evaluating = self.begin(Activity.EVAL) is not None

    def train(self) -> None:
        """End the evaluation, if one runs."""
        if self.evaluating:
            self.evaluating = False
            self.end(Activity.STEP)

    def furthest(self) -> int:
        """Return the most steps that a worker of this node has made in this round."""
        return self._board.furthest()

    def rejoined(self, steps: int) -> None:
        """Go on counting where another rank is."""
        self.steps = steps
        self._board.set_steps(self._slot, steps)

    def began_with(self, step: int) -> None:
        """Record that the training resumed from ``step``."""
        if self._thread and not self.steps:
            self._board.set_first_step(self._slot, step)

    def recorded(self, step: int) -> None:
        """Record the step number from the program's own file of steps, unless the start is known."""
        if not self._board.knows_first_step(self._slot):
            self._board.set_first_step(self._slot, step)

    def saves(self, step: int) -> None:
        """Derive the step number at the start from a save of ``step``, unless the start is known."""
        if self._thread and not self._board.knows_first_step(self._slot):
            self._board.set_first_step(self._slot, max(0, step - self.steps))

    def trains(self, parameters: int, parameter_bytes: int, state_bytes: int) -> None:
        """Record the trained parameters, their bytes, and the bytes of the optimizer's state."""
        self._board.set_profile(self._slot, parameters, parameter_bytes, state_bytes)

    def keeps_batch(self, samples: int) -> None:
        """Record the number of samples per step of all ranks, fixed for any number of ranks."""
        self._board.set_total_batch(self._slot, samples)

    def allows_batches(self, least: int, most: int, pass_most: int) -> None:
        """Record the samples of a global batch, ``least`` to ``most``, and a worker's maximum per pass."""
        self._board.set_batches(self._slot, least, most, pass_most)

    def measured_noise(self, square: float, variance: float) -> None:
        """Record the gradient noise: squared norm of the mean gradient, variance of a sample's gradient."""
        self._board.set_noise(self._slot, square, variance)

    def reads(self, data: int, partition: int, position: int) -> None:
        """Record the shard that the process reads, in any thread; ``data`` is the key of its dataset."""
        self._board.set_reading(self._slot, data, partition, position)

    def ends_in(self, steps: int) -> None:
        """Record the number of steps left in the training."""
        if self._thread:
            self._board.set_end(self._slot, self.steps + max(0, steps))

    def computed(self, nanoseconds: int) -> None:
        """Record the total time of the steps, without waiting for other ranks."""
        self._board.set_compute(self._slot, nanoseconds)

    def lose(self) -> None:
        """Stop showing this worker: steps can no longer be counted, so its data would be wrong."""
        self._board.forget(self._slot)

    def _change(self, activity: int, now: int) -> None:
        before = self._doing
        self._totals[before] += now - self._since
        self._doing, self._since = activity, now
        self._board.change(self._slot, before, self._totals[before], activity, now)


_trackers: list[Tracker] = []
"""The tracker of this process, if it is a watched worker."""


def watch(board: Board, slot: int) -> Tracker:
    """Start tracking this process in a slot of the board."""
    _trackers[:] = [Tracker(board, slot)]
    return _trackers[0]


def keeps_batch(samples: int) -> None:
    """Report ``samples`` per step of all ranks, whatever their number. No effect outside a job."""
    if _trackers:
        _trackers[0].keeps_batch(samples)


def allows_batches(least: int, most: int, pass_most: int) -> None:
    """Report the global batches that may be chosen, in samples. No effect outside a job."""
    if _trackers:
        _trackers[0].allows_batches(least, most, pass_most)


def measured_noise(square: float, variance: float) -> None:
    """Report the gradient noise. No effect outside a job."""
    if _trackers:
        _trackers[0].measured_noise(square, variance)


def apart() -> int:
    """Return this process's nanoseconds outside of steps and waits for data; 0 outside a job."""
    return _trackers[0].apart if _trackers else 0


def steps_left(steps: int) -> None:
    """Report how many optimizer steps the training has left, so that the job can estimate its remaining time.

    Not needed with Transformers' Trainer, whose steps are read automatically. No effect outside a job.

    Args:
        steps: Optimizer steps from now to the end of the training.
    """
    if _trackers:
        _trackers[0].ends_in(steps)


@contextlib.contextmanager
def activity(kind: str) -> Iterator[None]:
    """Report the activity of the training within a ``with`` block, where it is not detected automatically.

    Args:
        kind: ``"data"``, ``"compile"``, ``"eval"`` or ``"checkpoint"``. No effect outside a job, before the
            first optimizer step (except ``"compile"``), or within another such activity.

    Raises:
        ValueError: the activity is unknown.
    """
    known = {one.name.lower(): one for one in Activity if one > Activity.STEP}
    if kind not in known:
        raise ValueError(f"activity is {kind!r}; it must be one of {', '.join(known)}.")
    if not _trackers:
        yield
        return
    tracker = _trackers[0]
    before = tracker.begin(known[kind])
    try:
        yield
    finally:
        tracker.end(before)


def guarded(hook: Hook, lost: Callable[[], None] | None = None) -> Hook:
    """Wrap ``hook`` so that its first failure turns it off, with one line on standard error.

    A failure in this package must not end a training. ``lost`` is called after the failure.
    """
    failed = False

    @functools.wraps(hook)
    def call(*args: object, **kwargs: object) -> object:
        nonlocal failed
        if failed:
            return None
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - any failure
            failed = True
            with contextlib.suppress(OSError, ValueError):  # standard error may be closed
                print(  # noqa: T201
                    f"dlrover: {hook.__qualname__} is turned off: {type(error).__name__}: {error}",
                    file=sys.stderr,
                )
            if lost is not None:
                lost()
            return None

    return call  # type: ignore[return-value]
