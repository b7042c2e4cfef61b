"""Evidence of a worker's state, gathered from outside: CPU time, state, bytes read and written, stacks.

The stacks come from ``py-spy`` where it is installed and the kernel permits it, else from the worker's
signal handler (`dlrover.training.worker.stacks`). Neither needs the worker's cooperation: it may hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dlrover._util import procs
from dlrover.spec.failure import NOT_JOINED, TEXT_LIMIT, Failure, FailureKind, clip
from dlrover.spec.stacks import THREAD_ENDED, Frame, WorkerEvidence, groups, main_thread
from dlrover.training.worker.stacks import FILE_NAME, SIGNAL

PY_SPY_TIME = 10.0
"""Timeout of ``py-spy`` for one worker, in seconds."""
SIGNAL_TIME = 2.0
"""Timeout for a worker that writes its stacks itself, in seconds."""
SIGNAL_POLL = 0.02
CHILDREN_TIME = 5.0
"""Seconds after which no further child process of a worker is asked for its stacks."""
QUIET_TIME = 0.1
"""Seconds without new bytes after which the stacks count as complete."""
THREAD_TEXT, THREAD_TEXTS = 4096, 1 << 18
"""Characters kept of the exception that ended a thread and of what follows it, of one worker and of all of a node."""
ALL_TEXT, ALL_FRAMES = 1 << 20, 8192
"""Characters and frames of all workers of a node: their evidence is one message."""
_STOPPED = ("T", "t")
_TIMEOUT = re.compile(r"timed?[ -]?out", re.IGNORECASE)
_COLLECTIVE_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
TICKS = os.sysconf("SC_CLK_TCK")
FLIGHT_RECORDS = "/tmp/nccl_trace_rank_"  # noqa: S108
"""Default path prefix of PyTorch's flight recorder files."""


async def collect(pids: Sequence[int]) -> list[WorkerEvidence]:
    """Collect evidence of the given workers, each a session leader, at the same time."""
    cpu = _cpu_seconds(pids)
    stacks = await asyncio.gather(*(_stacks(pid) for pid in pids))
    of_children = await asyncio.gather(*(_children_stacks(pid) for pid in pids))
    room, depth = (most // max(1, len(pids)) for most in (ALL_TEXT, ALL_FRAMES))
    return [
        WorkerEvidence(
            pid=pid,
            time=time.monotonic(),
            state=_state(pid),
            cpu=cpu[pid],
            moved=_bytes_moved(pid),
            frames=main_thread(text)[:depth],
            text=clip(f"{text}{children}", min(room, TEXT_LIMIT)),
            source=source,
        )
        for pid, (source, text), children in zip(pids, stacks, of_children, strict=True)
    ]


def flight_record(env: Mapping[str, str], rank: int) -> str:
    """Return the path of the flight recorder file of ``rank``; empty if there is none.

    If ``TORCH_NCCL_DEBUG_INFO_PIPE_FILE`` is set, also ask the worker to write it.
    """
    pipe = env.get("TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
    if pipe:
        with contextlib.suppress(OSError):  # no process reads it
            fd = os.open(f"{pipe}{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
            os.write(fd, b"1")
            os.close(fd)
    for variable in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        path = Path(f"{env.get(variable, FLIGHT_RECORDS)}{rank}")
        if path.exists():
            return str(path)
    return ""


def gave_up(failure: Failure) -> bool:
    """Return whether a worker may have ended because others did not join a collective in time."""
    if failure.kind is FailureKind.EXCEPTION:
        return failure.exception in _COLLECTIVE_ERRORS and bool(_TIMEOUT.search(failure.message))
    return failure.signal == signal.SIGABRT and bool(_TIMEOUT.search(failure.stderr_tail))


async def not_joined(pids: Mapping[int, int]) -> list[str]:
    """Return facts about where those of some ranks (rank -> pid) are that do not wait for others."""
    found = await asyncio.gather(*(_stacks(pid) for pid in pids.values()))
    seen = [
        WorkerEvidence(pid=pid, rank=rank, time=0.0, state=_state(pid), frames=main_thread(text))
        for (rank, pid), (_source, text) in zip(pids.items(), found, strict=True)
    ]
    return [f"{NOT_JOINED}{group}" for group in groups(seen) if group.place and not group.waits]


def thread_error(stderr: str, workers: int) -> str:
    """Return the part of a standard error from the last exception that ended a thread; empty without one.

    The parts of all ``workers`` of a node are in one message.
    """
    begin, room = stderr.rfind(THREAD_ENDED), min(THREAD_TEXT, THREAD_TEXTS // workers)
    return stderr[begin : begin + room] if begin >= 0 else ""


# ---- the process


def _cpu_seconds(pids: Sequence[int]) -> dict[int, float]:
    """Return the CPU seconds of each worker's session: the worker and the processes that it started."""
    ticks = dict.fromkeys(pids, 0)
    for pid in procs.pids():
        fields = procs.stat(pid)
        session = int(fields[3]) if fields else 0
        if session in ticks:
            ticks[session] += sum(map(int, fields[11:15]))
    return {pid: count / TICKS for pid, count in ticks.items()}


def _state(pid: int) -> str:
    return next(iter(procs.stat(pid)), "")


def _bytes_moved(pid: int) -> int:
    """Return the bytes that the process has read and written so far; 0 if they cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines[:2])
    return 0


# ---- stacks


async def _stacks(pid: int) -> tuple[str, str]:
    """Return the tool that read a process's stacks, and the stacks; empty strings if all failed."""
    text = await _by_py_spy(pid)
    if text:
        return "py-spy", text
    text = await _by_signal(pid)
    return ("faulthandler", text) if text else ("", "")


async def _children_stacks(pid: int) -> str:
    """Return the stacks of the processes in a worker's session, such as a DataLoader's; one of those at each place."""
    until = time.monotonic() + CHILDREN_TIME
    places: dict[tuple[Frame, ...], tuple[list[int], str]] = {}
    for child in [p for p in procs.pids() if p != pid and procs.stat(p)[3:4] == [str(pid)]]:
        if time.monotonic() > until:
            break
        _, text = await _stacks(child)
        if text:
            places.setdefault(main_thread(text), ([], text))[0].append(child)
    return "".join(
        f"\n{_named(at)} of process {pid}:\n{text.strip()}\n" for at, text in places.values()
    )


def _named(pids: Sequence[int]) -> str:
    return f"child process{'es' if len(pids) > 1 else ''} {', '.join(map(str, pids))}"


async def _by_py_spy(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return ""
    before = _state(pid)
    process = await asyncio.create_subprocess_exec(
        program, "dump", "--full-filenames", "--pid", str(pid),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), PY_SPY_TIME)
    except asyncio.TimeoutError:
        process.kill()
        await process.wait()
        return ""
    finally:
        if process.returncode is None:  # the search was given up
            process.kill()
        _undo_stop(pid, before)
    return output.decode(errors="replace") if process.returncode == 0 else ""


def _undo_stop(pid: int, before: str) -> None:
    """Continue a process that a tracer has left stopped by SIGSTOP, unless it was stopped ``before``."""
    if before not in _STOPPED and _state(pid) in _STOPPED:
        with contextlib.suppress(OSError):  # the process has ended
            os.kill(pid, signal.SIGCONT)


async def _by_signal(pid: int) -> str:
    """Signal the process to write its stacks, but only if it handles the signal."""
    path = _stacks_file(pid)
    if path is None or not _handles_signal(pid):
        return ""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return ""
    try:
        os.ftruncate(fd, 0)
        os.kill(pid, SIGNAL)
        await _complete(fd)
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


async def _complete(fd: int) -> None:
    """Wait until the file has stopped growing, at most `SIGNAL_TIME`."""
    until = time.monotonic() + SIGNAL_TIME
    size, since = 0, time.monotonic()
    while (now := time.monotonic()) < until and not (size and now - since > QUIET_TIME):
        await asyncio.sleep(SIGNAL_POLL)
        if os.fstat(fd).st_size != size:
            size, since = os.fstat(fd).st_size, now


def _stacks_file(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(entry).startswith(f"/memfd:{FILE_NAME} "):
                    return entry
    return None


def _handles_signal(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False
