"""A worker as seen from outside, and what the stacks of many ranks show together."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Sequence

import msgspec

from dlrover.spec.measurements import WorkerActivity

STACK_FRAMES = 64
"""Innermost frames of a worker's main thread that are kept."""
BUSY = 5
"""Percent from which an accelerator counts as busy; monitoring alone uses less."""
MOVING = 5
"""Percent from which an accelerator's memory counts as used by a computation."""
FILES = 4096
"""Files of stacks whose kind is remembered."""
PLACES_NAMED = 6
"""Groups of ranks that a sentence names; the rest is only counted."""

THREAD_ENDED = "Exception in thread "
"""The interpreter's words before the traceback of an exception that ends a thread."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One call on a stack."""

    function: str
    file: str
    """Full path of the file, or the interpreter's replacement for it."""
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file.rpartition('/')[2]}:{self.line})"


class WorkerEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """State of one worker at one moment, gathered on its node."""

    pid: int
    time: float
    """Seconds on its node's monotonic clock."""
    rank: int = -1
    local_rank: int = -1
    state: str = ""
    """Process state as in proc(5): ``R`` runs, ``S`` sleeps, ``D`` waits for a disk, ``T`` is stopped."""
    cpu: float = 0.0
    """CPU seconds of the process and all of its descendants."""
    moved: int = 0
    """Bytes that the process has read and written."""
    frames: tuple[Frame, ...] = ()
    """Stack of the main thread, innermost call first; empty if unavailable."""
    text: str = ""
    """Stacks of all threads."""
    source: str = ""
    """Source of the stacks: ``py-spy``, ``faulthandler``, or empty."""
    activity: WorkerActivity | None = None
    flight_record: str = ""
    """File on its node with PyTorch's record of its communication."""
    thread_error: str = ""
    """The end of its standard error from the last exception that ended one of its threads; empty if none did."""
    busy: int = -1
    """Percent of the last moment in which its accelerator ran something; -1: unknown."""
    moving: int = -1
    """Percent in which its accelerator's memory was read or written; -1: unknown."""

    @property
    def device_computes(self) -> bool:
        """True if its accelerator computes; one that only waits in a collective hardly uses its memory."""
        return self.busy >= BUSY and self.moving >= MOVING

    @property
    def device(self) -> str:
        """State of its accelerator in words; empty if unknown."""
        if self.busy < 0:
            return ""
        state = f"{self.busy} % busy"
        if self.moving >= 0:
            state += f", memory {self.moving} %"
        if self.busy < BUSY:
            return f"{state}: it has next to nothing to do"
        if self.device_computes or self.moving < 0:
            return state
        return f"{state}: like a collective that waits for other ranks"


class StackGroup(msgspec.Struct, frozen=True):
    """Ranks at the same place."""

    place: str
    """The place in words: ``all_reduce (distributed_c10d.py:2800)``; empty if no stack is known."""
    ranks: tuple[int, ...]
    waits: bool
    """True if a rank at this place waits for others."""

    def __str__(self) -> str:
        return f"{ranks_in_words(self.ranks)} {'in ' + self.place if self.place else 'without a stack'}"


# ---- reading stacks

_PY_SPY_THREAD = re.compile(r'^Thread (0x[0-9A-Fa-f]+|\d+) \([\w+]+\)(?:: "(.*)")?', re.MULTILINE)
_PY_SPY_FRAME = re.compile(r"^ {4}(.+?) \((.+):(\d+)\)$", re.MULTILINE)
_FAULTHANDLER_THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
_FAULTHANDLER_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.+)$', re.MULTILINE)


def main_thread(text: str) -> tuple[Frame, ...]:
    """Return the main thread's frames in a dump of ``py-spy`` or `faulthandler`; empty if not found."""
    if _FAULTHANDLER_THREAD.search(text):
        last = _FAULTHANDLER_THREAD.split(text)[-1]  # threads come newest first
        found = [Frame(m[3], m[1], int(m[2])) for m in _FAULTHANDLER_FRAME.finditer(last)]
        return tuple(found[:STACK_FRAMES])
    threads = list(_PY_SPY_THREAD.finditer(text))
    if not threads:
        return ()
    chosen = next((i for i, t in enumerate(threads) if t[2] == "MainThread"), 0)
    end = threads[chosen + 1].start() if chosen + 1 < len(threads) else len(text)
    block = text[threads[chosen].end() : end]
    found = [Frame(m[1], m[2], int(m[3])) for m in _PY_SPY_FRAME.finditer(block)]
    return tuple(found[:STACK_FRAMES])


# ---- places

_LIBRARY = re.compile(r"/(?:site|dist)-packages/")
_STANDARD = re.compile(r"/lib/python\d[^/]*/(?!(?:site|dist)-packages/)|^<(?!stdin|string)")
_OWN = re.compile(r"/dlrover/(?:training/worker|agent/workers)/\w+\.py$")
_DATA_LOADER = "torch/utils/data/dataloader.py"
_WAITING = re.compile(
    r"torch/distributed/(?!checkpoint/|elastic/)|torch/autograd/graph\.py$|torch/nn/parallel/distributed\.py$"
    r"|deepspeed/comm/"
)
"""Files in which a rank waits for others: collectives, and the end of the backward pass, where gradients
are exchanged."""


def place(frames: Sequence[Frame]) -> str:
    """Return where a thread is, in words: the call that it waits or works in, and the program's line."""
    inner = _telling_frame(frames)
    if inner is None:
        return ""
    program = next((f for f in frames if _is_program(f)), None)
    if program is None or program == inner:
        return str(inner)
    return f"{inner}, called by {program}"


def waits_for_others(frames: Sequence[Frame]) -> bool:
    """Return whether a thread waits for other ranks, as far as its stack shows."""
    inner = _telling_frame(frames)
    return inner is not None and _waits(inner.file)


def same_calls(one: Sequence[Frame], other: Sequence[Frame]) -> bool:
    """Return whether two stacks have the same calls; the innermost call may be at another line."""
    calls = [[(f.function, f.file, f.line) for f in frames] for frames in (one, other)]
    outer = [frames[1:] for frames in calls]
    return bool(one) and outer[0] == outer[1] and calls[0][0][:2] == calls[1][0][:2]


def _telling_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost call that shows what a thread does, if possible not the standard library's."""
    telling = (f for f in frames if _tells(f.file))
    first = next(telling, None)
    if first is None:
        return frames[0] if frames else None
    if first.file.endswith(_DATA_LOADER):
        loading = itertools.chain((first,), telling)
        return next((f for f in loading if f.function.endswith("__next__")), first)
    return first


# Thousands of ranks have the same few files on their stacks.
@functools.lru_cache(FILES)
def _tells(file: str) -> bool:
    return not (_STANDARD.search(file) or _OWN.search(file))


@functools.lru_cache(FILES)
def _waits(file: str) -> bool:
    return _WAITING.search(file) is not None


def _is_program(frame: Frame) -> bool:
    return _tells(frame.file) and not _is_of_library(frame.file)


@functools.lru_cache(FILES)
def _is_of_library(file: str) -> bool:
    return _LIBRARY.search(file) is not None


# ---- groups


def groups(evidence: Iterable[WorkerEvidence]) -> tuple[StackGroup, ...]:
    """Return the ranks grouped by place, the largest group first."""
    ranks: dict[str, list[int]] = {}
    waits: dict[str, bool] = {}
    for one in evidence:
        name = place(one.frames) if one.state not in ("T", "t") else "a stopped process"
        ranks.setdefault(name, []).append(one.rank)
        waits[name] = waits_for_others(one.frames) and one.state not in ("T", "t")
    found = [StackGroup(name, tuple(sorted(at)), waits[name]) for name, at in ranks.items()]
    return tuple(sorted(found, key=lambda group: (-len(group.ranks), group.ranks)))


def culprits(found: Sequence[StackGroup], missing: Iterable[int] = ()) -> tuple[int, ...]:
    """Return the ranks that the others wait for; empty if nothing distinguishes them.

    These are the ranks that did not answer; else the minority that does not wait for others; else the ranks
    outside of the largest group.
    """
    silent = tuple(sorted(missing))
    total = sum(len(group.ranks) for group in found)
    if silent or total == 1:
        return silent or found[0].ranks
    if len(found) <= 1:
        return ()
    odd: Sequence[StackGroup] = [group for group in found if not group.waits]
    if not odd or 2 * sum(len(group.ranks) for group in odd) > total:
        odd = _beside_most(found, odd, total)
    return tuple(sorted(rank for group in odd for rank in group.ranks))


def starved(evidence: Iterable[WorkerEvidence]) -> tuple[int, ...]:
    """Return the ranks whose accelerators are idle while those of most others are busy.

    The busy ones wait in a collective that these have not begun. Empty unless the state of all is known.
    """
    known = list(evidence)
    idle = tuple(sorted(one.rank for one in known if 0 <= one.busy < BUSY))
    complete = all(one.busy >= 0 for one in known)
    return idle if complete and 0 < 2 * len(idle) < len(known) else ()


def _beside_most(
    found: Sequence[StackGroup], odd: Sequence[StackGroup], total: int
) -> Sequence[StackGroup]:
    """Return the groups beside the one with most ranks; the majority waits, by whatever means."""
    most = found[0]
    if 2 * len(most.ranks) <= total:
        return odd if len(odd) < len(found) else ()
    others = found[1:]
    return [group for group in others if not group.waits] or others


def in_words(found: Sequence[StackGroup], missing: Iterable[int] = ()) -> str:
    """Return the groups as part of a sentence."""
    named = [str(group) for group in found[:PLACES_NAMED]]
    rest = sum(len(group.ranks) for group in found[PLACES_NAMED:])
    if rest:
        named.append(f"{rest} elsewhere")
    silent = tuple(missing)
    if silent:
        named.append(f"{ranks_in_words(silent)} did not answer")
    return "; ".join(named)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 3 and 5``, or ``62 ranks`` if there are many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == 2:
        return f"ranks {ranks[0]} and {ranks[1]}"
    return f"{len(ranks)} ranks"


def report(evidence: Iterable[WorkerEvidence], missing: Iterable[int] = ()) -> str:
    """Return a full report: each group with its ranks and the stacks of its first rank."""
    by_rank = {one.rank: one for one in evidence}
    silent = sorted(missing)
    parts = []
    for group in groups(by_rank.values()):
        first = by_rank[group.ranks[0]]
        ranks = ", ".join(map(str, group.ranks))
        flights = [
            f"rank {r}: {by_rank[r].flight_record}" for r in group.ranks if by_rank[r].flight_record
        ]
        parts.append(
            f"{len(group.ranks)} of {len(by_rank) + len(silent)} ranks ({ranks}) "
            f"{'in ' + group.place if group.place else 'without a stack'}\n"
            f"the stacks of rank {first.rank} (process {first.pid}, state {first.state or 'unknown'}):\n"
            f"{first.text.strip() or 'none'}\n"
            + "".join(f"flight record of {f}\n" for f in flights)
            + next(
                (
                    f"standard error of rank {r}:\n{by_rank[r].thread_error}\n"
                    for r in group.ranks
                    if by_rank[r].thread_error
                ),
                "",
            )
            + "".join(
                f"accelerator of rank {r}: {by_rank[r].device}\n"
                for r in group.ranks
                if by_rank[r].device
            )
        )
    if silent:
        parts.append(f"no answer from ranks {', '.join(map(str, silent))}\n")
    return "\n".join(parts)
