"""The progress board: a node's shared memory in which each worker records its activity and progress.

A worker writes its own slot; its agent reads all slots; neither waits for the other. A slot is 32 64-bit
integers, each stored by a single aligned write:

===== ==========================================================================================
0     optimizer steps completed
1, 2  end of the first and of the latest step, nanoseconds since the epoch
3     1 once the worker has written the list of its imported modules
4     start of the worker, monotonic nanoseconds; 0 for a program that is not watched
5     current activity and its start: 8 * monotonic nanoseconds + `Activity`
6-11  nanoseconds by `Activity`; the current activity is added when it ends
12    nanoseconds of its steps without waiting for other ranks
13    step number at which it started, plus 1; 0 while unknown
14    samples per step of all ranks, if the program keeps that number fixed; 0 otherwise
15-17 parameters that its optimizer trains, their bytes, and the bytes of the optimizer's state
18    steps that it will have completed at the end of the training, plus 1; 0 while unknown
19-21 the shard that it reads: key of the dataset (0: none), partition, position
22-24 minimum and maximum samples of the global batch, and maximum samples of one pass; 0: batch is fixed
25-26 squared norm of the mean gradient, variance of a sample's gradient, as bits of doubles; 0: unmeasured
27    1 once the program has ended by itself and without an error, 2 once an error has ended it, before its process ends
28-31 unused
===== ==========================================================================================

The time in the current activity is the worker's age minus the time in all other activities. So the times by
activity always add up to the age, at whatever moment the slot is read.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from dlrover.spec.activity import Activity

if TYPE_CHECKING:  # imports packages that a training program may lack
    from dlrover.spec.measurements import Batches, WorkerActivity

SLOT_WORDS = 32
WORD_BYTES = 8
MAX_SLOTS = 1024
"""Maximum number of workers on the board."""
BOARD_BYTES = -(-MAX_SLOTS * SLOT_WORDS * WORD_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
"""Size of the board, in whole pages."""

READS = 100
"""Maximum repeated reads of a slot that changes while it is read."""

_STEPS, _FIRST, _LAST, _LISTED, _BORN, _NOW, _TOTALS = range(7)
_COMPUTE = _TOTALS + len(Activity)
_FIRST_STEP = _COMPUTE + 1
_TOTAL_BATCH = _FIRST_STEP + 1
_PROFILE = _TOTAL_BATCH + 1
_END = _PROFILE + 3
_READING = _END + 1
_BATCHES = _READING + 3
_NOISE = _BATCHES + 3
_END_OF_PROGRAM = _NOISE + 2
_FINISHED, _FAILED = 1, 2
"""Values of the word ``_END_OF_PROGRAM``; 0: the program runs."""
_DOUBLE, _DOUBLE_BITS = struct.Struct("=d"), struct.Struct("=Q")
_KINDS = 8
"""Number of activities that word 5 can encode."""


class Slot(NamedTuple):
    """One worker's progress; times are seconds since the epoch, 0.0 before the first step."""

    steps: int
    first_step: float
    last_step: float
    modules_listed: bool


class Board:
    """The board, in the memory behind a file descriptor shared by agent, zygote and workers."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, BOARD_BYTES)
        self._words = memoryview(self._map).cast("Q")

    # ---- the agent

    def clear(self, slot: int | None = None) -> None:
        """Erase the progress of the last round, or that of the last worker of one slot."""
        first, slots = (0, MAX_SLOTS) if slot is None else (slot, 1)
        for word in range(first * SLOT_WORDS, (first + slots) * SLOT_WORDS):
            self._words[word] = 0

    def read(self, slot: int) -> Slot:
        """Return the step count of the worker of ``slot``, with its step times."""
        base = slot * SLOT_WORDS
        steps, first, last, listed = self._words[base : base + _BORN]
        return Slot(steps, first / 1e9, last / 1e9, bool(listed))

    def began_with(self, slot: int) -> int:
        """Return the step number at which the worker of ``slot`` started; -1 while unknown."""
        return int(self._words[slot * SLOT_WORDS + _FIRST_STEP]) - 1

    def activity(self, slot: int, now: int, *, ended: bool = False) -> WorkerActivity | None:
        """Return the worker's activity at ``now``; None if it is not watched or has not begun.

        ``now`` is monotonic, in nanoseconds.
        """
        from dlrover.spec.measurements import WorkerActivity  # noqa: PLC0415 - agents only

        words = self._read_unchanged(slot)
        if not words[_BORN]:
            return None
        since, doing = divmod(words[_NOW], _KINDS)
        if doing >= len(Activity):
            return None  # the program has overwritten it
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
        """Return the shard that the worker reads: key of the dataset, partition, position; None if none."""
        base = slot * SLOT_WORDS + _READING
        key, partition, position = self._words[base : base + 3]
        return (key, partition, position) if key else None

    def finished(self, slot: int) -> bool:
        """Return whether the program of the worker of ``slot`` has ended by itself and without an error."""
        return self._words[slot * SLOT_WORDS + _END_OF_PROGRAM] == _FINISHED

    def failed(self, slot: int) -> bool:
        """Return whether an error has ended the program of the worker of ``slot``; threads of it may go on."""
        return self._words[slot * SLOT_WORDS + _END_OF_PROGRAM] == _FAILED

    def _read_unchanged(self, slot: int) -> Sequence[int]:
        """Return a consistent snapshot of a slot; retry at most `READS` times while the worker changes it."""
        base = slot * SLOT_WORDS
        words = self._words[base : base + SLOT_WORDS].tolist()
        for _ in range(READS):
            before, words = words, self._words[base : base + SLOT_WORDS].tolist()
            if before == words:
                break
        return words

    # ---- the worker

    def begin(self, slot: int, now: int) -> None:
        """Start watching this worker at ``now`` (monotonic nanoseconds)."""
        base = slot * SLOT_WORDS
        self._words[base + _NOW] = now * _KINDS + Activity.START
        self._words[base + _BORN] = now

    def forget(self, slot: int) -> None:
        """Stop watching this worker."""
        self._words[slot * SLOT_WORDS + _BORN] = 0

    def change(self, slot: int, before: int, total: int, doing: int, now: int) -> None:
        """End activity ``before`` with ``total`` nanoseconds in all; ``doing`` begins at ``now``."""
        base = slot * SLOT_WORDS
        self._words[base + _TOTALS + before] = total
        self._words[base + _NOW] = now * _KINDS + doing

    def count_step(self, slot: int) -> int:
        """Add one step; return the number of completed steps."""
        base = slot * SLOT_WORDS
        now = time.time_ns()
        steps = self._words[base + _STEPS] + 1
        self._words[base + _LAST] = now
        if steps == 1:
            self._words[base + _FIRST] = now
        self._words[base + _STEPS] = steps
        return steps

    def furthest(self) -> int:
        """Return the most steps of all slots."""
        return max(self._words[::SLOT_WORDS])

    def set_steps(self, slot: int, steps: int) -> None:
        """Go on counting from another worker's ``steps``."""
        self._words[slot * SLOT_WORDS + _STEPS] = steps

    def set_reading(self, slot: int, key: int, partition: int, position: int) -> None:
        """Record the shard that the worker reads."""
        base = slot * SLOT_WORDS + _READING
        self._words[base] = 0  # a reader sees no shard rather than a mixed one
        self._words[base + 1] = partition
        self._words[base + 2] = position
        self._words[base] = key

    def set_compute(self, slot: int, nanoseconds: int) -> None:
        """Record the total time of the worker's steps, without waiting for other ranks."""
        self._words[slot * SLOT_WORDS + _COMPUTE] = nanoseconds

    def set_first_step(self, slot: int, step: int) -> None:
        """Record the step number at which the worker started."""
        self._words[slot * SLOT_WORDS + _FIRST_STEP] = step + 1

    def set_total_batch(self, slot: int, samples: int) -> None:
        """Record the fixed number of samples per step of all ranks."""
        self._words[slot * SLOT_WORDS + _TOTAL_BATCH] = samples

    def set_batches(self, slot: int, least: int, most: int, pass_most: int) -> None:
        """Record the samples of a global batch, ``least`` to ``most``, and a worker's maximum per pass."""
        base = slot * SLOT_WORDS + _BATCHES
        for word, value in enumerate((least, most, pass_most)):
            self._words[base + word] = value

    def set_noise(self, slot: int, square: float, variance: float) -> None:
        """Record the gradient noise: squared norm of the mean gradient, variance of a sample's gradient."""
        base = slot * SLOT_WORDS + _NOISE
        for word, value in enumerate((square, variance)):
            self._words[base + word] = _DOUBLE_BITS.unpack(_DOUBLE.pack(value))[0]

    def set_profile(self, slot: int, parameters: int, parameter_bytes: int, state: int) -> None:
        """Record the trained parameters, their bytes, and the bytes of the optimizer's state."""
        base = slot * SLOT_WORDS + _PROFILE
        for word, value in enumerate((parameters, parameter_bytes, state)):
            self._words[base + word] = value

    def knows_first_step(self, slot: int) -> bool:
        """Return whether the step number at which the worker started is known."""
        return self._words[slot * SLOT_WORDS + _FIRST_STEP] > 0

    def set_end(self, slot: int, steps: int) -> None:
        """Record the number of completed steps at which the training ends."""
        self._words[slot * SLOT_WORDS + _END] = steps + 1

    def mark_finished(self, slot: int) -> None:
        """Record that the program has ended by itself and without an error."""
        self._words[slot * SLOT_WORDS + _END_OF_PROGRAM] = _FINISHED

    def mark_failed(self, slot: int) -> None:
        """Record that an error has ended the program."""
        self._words[slot * SLOT_WORDS + _END_OF_PROGRAM] = _FAILED

    def mark_modules_listed(self, slot: int) -> None:
        """Signal to the agent that this worker has written its list of modules."""
        self._words[slot * SLOT_WORDS + _LISTED] = 1


def _batches(words: Sequence[int]) -> Batches | None:
    """Return the allowed global batches and their noise; None if the global batch is fixed."""
    from dlrover.spec.measurements import Batches  # noqa: PLC0415 - agents only

    least, most, pass_most = words[_BATCHES:_NOISE]
    if not least:
        return None
    square, variance = (
        _DOUBLE.unpack(_DOUBLE_BITS.pack(word))[0] for word in words[_NOISE : _NOISE + 2]
    )
    return Batches(least=least, most=most, pass_most=pass_most, square=square, variance=variance)
