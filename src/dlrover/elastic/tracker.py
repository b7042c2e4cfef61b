"""What this worker does: the hooks tell it, the progress board shows it.

Only the thread that trains counts: the main one, or the one that made the first optimizer step. What a
data loader's or a checkpoint's own process or thread does is not what the training waits for.
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

from dlrover.elastic.progress import Board
from dlrover.spec.activities import Activity

_INTERRUPTIONS: dict[int, frozenset[int]] = {
    Activity.START: frozenset({Activity.COMPILE}),
    Activity.STEP: frozenset({Activity.DATA, Activity.COMPILE, Activity.EVAL, Activity.CHECKPOINT}),
    Activity.EVAL: frozenset({Activity.COMPILE, Activity.CHECKPOINT}),
    Activity.DATA: frozenset(),
    Activity.COMPILE: frozenset(),
    Activity.CHECKPOINT: frozenset(),
}
"""What shows within an activity. Anything else belongs to it: the batches of an evaluation, say."""

Hook = TypeVar("Hook", bound=Callable[..., object])


class Tracker:
    """One worker's activity. All times are monotonic nanoseconds."""

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
        """A process that the worker has forked is not the worker."""
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
        """An optimizer step has ended; whether it counts."""
        if threading.get_ident() != self._thread:
            if self.steps or not self._thread:
                return False
            self._thread = threading.get_ident()
        self.evaluating = False
        self._change(Activity.STEP, now)
        self.steps = self._board.count_step(self._slot)
        return True

    def begin(self, activity: int) -> int | None:
        """Something else begins, unless it does not show; what `end` needs to know."""
        before = self._doing
        if threading.get_ident() != self._thread or activity not in _INTERRUPTIONS[before]:
            return None
        self._change(activity, time.monotonic_ns())
        return before

    def end(self, before: int | None) -> None:
        """What began is over."""
        if before is not None and threading.get_ident() == self._thread:
            self._change(before, time.monotonic_ns())

    def evaluate(self) -> None:
        """An evaluation begins; it ends with `train` or the next step."""
        self.evaluating = self.begin(Activity.EVAL) is not None

    def train(self) -> None:
        """The evaluation is over."""
        if self.evaluating:
            self.evaluating = False
            self.end(Activity.STEP)

    def began_with(self, step: int) -> None:
        """The training went on from ``step``."""
        if self._thread and not self.steps:
            self._board.set_first_step(self._slot, step)

    def recorded(self, step: int) -> None:
        """The program had recorded ``step`` steps before its first one of this round."""
        if not self._board.knows_first_step(self._slot):
            self._board.set_first_step(self._slot, step)

    def saves(self, step: int) -> None:
        """The training saves ``step``: unless it was told before, that says which one it began with."""
        if self._thread and not self._board.knows_first_step(self._slot):
            self._board.set_first_step(self._slot, max(0, step - self.steps))

    def trains(self, parameters: int, parameter_bytes: int, state_bytes: int) -> None:
        """The optimizer trains so many numbers, and keeps so many bytes beside theirs."""
        self._board.set_profile(self._slot, parameters, parameter_bytes, state_bytes)

    def keeps_batch(self, samples: int) -> None:
        """A step of all ranks has so many samples, whatever the number of ranks."""
        self._board.set_total_batch(self._slot, samples)

    def allows_batches(self, least: int, most: int, pass_most: int) -> None:
        """The global batch may have from ``least`` to ``most`` samples, ``pass_most`` of a worker at once."""
        self._board.set_batches(self._slot, least, most, pass_most)

    def measured_noise(self, square: float, variance: float) -> None:
        """The gradients are so noisy: squared norm of the mean one, variance of that of a sample."""
        self._board.set_noise(self._slot, square, variance)

    def reads(self, data: int, lane: int, position: int) -> None:
        """The process reads this shard now, in whatever thread; ``data`` is the key of its data set."""
        self._board.set_reading(self._slot, data, lane, position)

    def ends_in(self, steps: int) -> None:
        """The training has so many steps left."""
        if self._thread:
            self._board.set_end(self._slot, self.steps + max(0, steps))

    def computed(self, nanoseconds: int) -> None:
        """The steps took so long, without waiting for other ranks."""
        self._board.set_compute(self._slot, nanoseconds)

    def lose(self) -> None:
        """Steps can no longer be counted: nothing that is shown would be true."""
        self._board.forget(self._slot)

    def _change(self, activity: int, now: int) -> None:
        before = self._doing
        self._totals[before] += now - self._since
        self._doing, self._since = activity, now
        self._board.change(self._slot, before, self._totals[before], activity, now)


_trackers: list[Tracker] = []
"""The one of this process, if it is a worker that is watched."""


def watch(board: Board, slot: int) -> Tracker:
    """Begin to keep what this process does in a slot of the board."""
    _trackers[:] = [Tracker(board, slot)]
    return _trackers[0]


def keeps_batch(samples: int) -> None:
    """Tell that a step of all ranks has ``samples``, whatever their number. No effect outside of a job."""
    if _trackers:
        _trackers[0].keeps_batch(samples)


def allows_batches(least: int, most: int, pass_most: int) -> None:
    """Tell from which global batches may be chosen. No effect outside of a job."""
    if _trackers:
        _trackers[0].allows_batches(least, most, pass_most)


def measured_noise(square: float, variance: float) -> None:
    """Tell how noisy the gradients are. No effect outside of a job."""
    if _trackers:
        _trackers[0].measured_noise(square, variance)


def apart() -> int:
    """Nanoseconds that this process has spent neither on steps nor on their data; 0 outside of a job."""
    return _trackers[0].apart if _trackers else 0


def steps_left(steps: int) -> None:
    """Tell how many optimizer steps the training has left, so that the job can say how long it will take.

    Transformers' Trainer does it itself. No effect outside of a job.

    Args:
        steps: Steps of the optimizer from now to the training's end.
    """
    if _trackers:
        _trackers[0].ends_in(steps)


@contextlib.contextmanager
def activity(kind: str) -> Iterator[None]:
    """Tell what the training does in a ``with`` block, where nothing else tells.

    Args:
        kind: ``"data"``, ``"compile"``, ``"eval"`` or ``"checkpoint"``. No effect outside of a job, before
            the first optimizer step (``"compile"`` excepted), and within another such activity.

    Raises:
        ValueError: there is no such activity.
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
    """``hook``, which is turned off with one line on standard error when it fails.

    A failure of ours must not end a training. ``lost`` is called then.
    """
    failed = False

    @functools.wraps(hook)
    def call(*args: object, **kwargs: object) -> object:
        nonlocal failed
        if failed:
            return None
        try:
            return hook(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever it is
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
