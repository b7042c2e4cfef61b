"""The progress board: memory per node in which each worker keeps what it does and what it has done.

A worker writes its own slot, its agent reads all of them; nobody waits for anybody. A slot is 32 64-bit
integers, each stored by a single aligned write:

===== ==========================================================================================
0     optimizer steps completed
1, 2  when the first and the latest step ended, nanoseconds since the epoch
3     1 once the worker has written the list of its imported modules
4     when the worker began, on the monotonic clock (nanoseconds); 0 for a program that is not watched
5     what it does and since when: 8 * monotonic nanoseconds + `Activity`
6-11  nanoseconds by `Activity`; what it does now is counted when it ends
12    nanoseconds of its steps that it did not wait for other ranks
13    the number of the step that it began with, plus 1; 0 while that is not known
14    samples of a step of all ranks, where the program keeps that fixed; 0 otherwise
15-17 numbers that its optimizer trains, their bytes, and the bytes that the optimizer keeps beside them
18    how many steps it will have completed at the end of the training, plus 1; 0 while that is not known
19-21 the shard whose samples it reads: key of the data set (0: none), lane, position
22-24 the least and the most samples that the global batch may have, and those of one pass; 0: it stays
25-26 squared norm of the mean gradient, variance of that of a sample, as bits of doubles; 0: not measured
27-31 nothing yet
===== ==========================================================================================

What a worker does now has lasted as long as its age less all other activities. So the times by activity
always add up to its age, whenever the slot is read.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dlrover.spec.activities import Activity

if TYPE_CHECKING:  # it loads what a training program may not have
    from dlrover.spec.activity import WorkerActivity
    from dlrover.spec.batches import Batches

SLOT_WORDS = 32
WORD_BYTES = 8
MAX_SLOTS = 128
"""Workers that the board has room for."""
BOARD_BYTES = -(-MAX_SLOTS * SLOT_WORDS * WORD_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
"""The size of the board: whole pages."""

READS = 100
"""How often a slot is read again that changes meanwhile."""

_STEPS, _FIRST, _LAST, _LISTED, _BORN, _NOW, _TOTALS = range(7)
_COMPUTE = _TOTALS + len(Activity)
_FIRST_STEP = _COMPUTE + 1
_TOTAL_BATCH = _FIRST_STEP + 1
_PROFILE = _TOTAL_BATCH + 1
_END = _PROFILE + 3
_READING = _END + 1
_BATCHES = _READING + 3
_NOISE = _BATCHES + 3
_DOUBLE, _DOUBLE_BITS = struct.Struct("=d"), struct.Struct("=Q")
_KINDS = 8
"""Activities that word 5 has room for."""


class Slot(NamedTuple):
    """One worker's progress. Times are seconds since the epoch, 0.0 before the first step."""

    steps: int
    first_step: float
    last_step: float
    modules_listed: bool


class Board:
    """The memory behind a file descriptor that agent, zygote and workers share."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, BOARD_BYTES)
        self._words = memoryview(self._map).cast("Q")

    # ---- the agent

    def clear(self) -> None:
        """Forget the last round's progress."""
        for word in range(len(self._words)):
            self._words[word] = 0

    def read(self, slot: int) -> Slot:
        """How many steps the worker of ``slot`` has made, and when."""
        base = slot * SLOT_WORDS
        steps, first, last, listed = self._words[base : base + _BORN]
        return Slot(steps, first / 1e9, last / 1e9, bool(listed))

    def began_with(self, slot: int) -> int:
        """The number of the step that the worker of ``slot`` began with; -1 while that is not known."""
        return int(self._words[slot * SLOT_WORDS + _FIRST_STEP]) - 1

    def activity(self, slot: int, now: int, *, ended: bool = False) -> WorkerActivity | None:
        """What the worker of ``slot`` does at ``now``; None if it is not watched, or has not begun.

        ``now`` is on the monotonic clock, in nanoseconds.
        """
        from dlrover.spec.activity import WorkerActivity  # noqa: PLC0415 - agents only

        words = self._read_unchanged(slot)
        if not words[_BORN]:
            return None
        since, doing = divmod(words[_NOW], _KINDS)
        age = max(0, now - words[_BORN])
        nanoseconds = list(words[_TOTALS:_COMPUTE])
        nanoseconds[doing] = 0
        nanoseconds[doing] = max(0, age - sum(nanoseconds))
        return WorkerActivity(
            steps=words[_STEPS],
            doing=doing,
            since=max(0, now - since) / 1e9,
            seconds=tuple(n / 1e9 for n in nanoseconds),
            compute=words[_COMPUTE] / 1e9,
            first_step=words[_FIRST_STEP] - 1,
            ended=ended,
            total_batch=words[_TOTAL_BATCH],
            parameters=words[_PROFILE],
            parameter_bytes=words[_PROFILE + 1],
            state_bytes=words[_PROFILE + 2],
            left=max(0, words[_END] - 1 - words[_STEPS]) if words[_END] else -1,
            batches=_batches(words),
        )

    def reading(self, slot: int) -> tuple[int, int, int] | None:
        """The shard that the worker of ``slot`` reads: key of the data set, lane and position; None if none."""
        base = slot * SLOT_WORDS + _READING
        key, lane, position = self._words[base : base + 3]
        return (key, lane, position) if key else None

    def _read_unchanged(self, slot: int) -> Sequence[int]:
        """The words of a slot at one moment: read again if the worker did something else meanwhile."""
        base = slot * SLOT_WORDS
        words = self._words[base : base + SLOT_WORDS].tolist()
        for _ in range(READS):
            before, words = words, self._words[base : base + SLOT_WORDS].tolist()
            if before == words:
                break
        return words

    # ---- the worker

    def begin(self, slot: int, now: int) -> None:
        """This worker is watched from now on (monotonic nanoseconds)."""
        base = slot * SLOT_WORDS
        self._words[base + _NOW] = now * _KINDS + Activity.START
        self._words[base + _BORN] = now

    def forget(self, slot: int) -> None:
        """This worker is not watched any more."""
        self._words[slot * SLOT_WORDS + _BORN] = 0

    def change(self, slot: int, before: int, total: int, doing: int, now: int) -> None:
        """The worker has done ``before`` for ``total`` nanoseconds in all, and does ``doing`` now."""
        base = slot * SLOT_WORDS
        self._words[base + _TOTALS + before] = total
        self._words[base + _NOW] = now * _KINDS + doing

    def count_step(self, slot: int) -> int:
        """Add one step; the number of steps completed."""
        base = slot * SLOT_WORDS
        now = time.time_ns()
        steps = self._words[base + _STEPS] + 1
        self._words[base + _LAST] = now
        if steps == 1:
            self._words[base + _FIRST] = now
        self._words[base + _STEPS] = steps
        return steps

    def set_reading(self, slot: int, key: int, lane: int, position: int) -> None:
        """The worker reads this shard now."""
        base = slot * SLOT_WORDS + _READING
        self._words[base] = 0  # for a moment it says nothing rather than what is half true
        self._words[base + 1] = lane
        self._words[base + 2] = position
        self._words[base] = key

    def set_compute(self, slot: int, nanoseconds: int) -> None:
        """How long the worker's steps took without waiting for other ranks."""
        self._words[slot * SLOT_WORDS + _COMPUTE] = nanoseconds

    def set_first_step(self, slot: int, step: int) -> None:
        """The worker began with this step."""
        self._words[slot * SLOT_WORDS + _FIRST_STEP] = step + 1

    def set_total_batch(self, slot: int, samples: int) -> None:
        """A step of all ranks has so many samples, whatever their number."""
        self._words[slot * SLOT_WORDS + _TOTAL_BATCH] = samples

    def set_batches(self, slot: int, least: int, most: int, pass_most: int) -> None:
        """The global batch may have from ``least`` to ``most`` samples, ``pass_most`` of a worker at once."""
        base = slot * SLOT_WORDS + _BATCHES
        for word, value in enumerate((least, most, pass_most)):
            self._words[base + word] = value

    def set_noise(self, slot: int, square: float, variance: float) -> None:
        """The gradients were measured to be so noisy."""
        base = slot * SLOT_WORDS + _NOISE
        for word, value in enumerate((square, variance)):
            self._words[base + word] = _DOUBLE_BITS.unpack(_DOUBLE.pack(value))[0]

    def set_profile(self, slot: int, parameters: int, parameter_bytes: int, state: int) -> None:
        """What the worker's optimizer trains, and the bytes that it keeps beside that."""
        base = slot * SLOT_WORDS + _PROFILE
        for word, value in enumerate((parameters, parameter_bytes, state)):
            self._words[base + word] = value

    def knows_first_step(self, slot: int) -> bool:
        """Whether the worker knows which step it began with."""
        return self._words[slot * SLOT_WORDS + _FIRST_STEP] > 0

    def set_end(self, slot: int, steps: int) -> None:
        """The training ends when the worker has completed so many steps."""
        self._words[slot * SLOT_WORDS + _END] = steps + 1

    def mark_modules_listed(self, slot: int) -> None:
        """Tell the agent that this worker has written its list of modules."""
        self._words[slot * SLOT_WORDS + _LISTED] = 1


def _batches(words: Sequence[int]) -> Batches | None:
    """The choice of the global batch; None: it stays."""
    from dlrover.spec.batches import Batches  # noqa: PLC0415 - agents only

    least, most, pass_most = words[_BATCHES:_NOISE]
    if not least:
        return None
    square, variance = (
        _DOUBLE.unpack(_DOUBLE_BITS.pack(word))[0] for word in words[_NOISE : _NOISE + 2]
    )
    return Batches(least=least, most=most, pass_most=pass_most, square=square, variance=variance)
