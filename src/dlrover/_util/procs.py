"""Processes: who dies with whom, and who cleans up."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Container, Iterable
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of the system's init."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def open_standard_streams() -> None:
    """Open the null device in the place of each standard stream that this process was started without.

    Call it first: another file would get the number, and children would take it for their stream.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_RDWR)
        if null != fd:
            os.dup2(null, fd)
            os.close(null)
        os.set_inheritable(fd, True)
        setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - open as long as the process


def survives_hangup(number: signal.Signals) -> bool:
    """Whether this is the signal of a lost terminal and was ignored before this process began, as by nohup."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def start_time(pid: int) -> int:
    """When process ``pid`` started, in clock ticks since boot; 0 if there is no such process.

    Together with the pid it names a process for ever; the pid alone is used again.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(stat.rpartition(")")[2].split()[19])


def runs(pid: int, started: int) -> bool:
    """Whether the process ``pid`` that started then still runs: one that nobody has reaped yet does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return fields[0] != "Z" and int(fields[19]) == started


def pids() -> list[int]:
    """Pids of all processes that this one sees."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def command(pid: int) -> list[str]:
    """The words of a process's command; empty for one that has ended or is another user's secret."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return words[:-1]


def children() -> list[int]:
    """Pids of this process's children."""
    me = os.getpid()
    return [pid for pid in pids() if _parent(pid) == me]


def running(module: str) -> set[int]:
    """Those of this process's children that are ``python -m module``."""
    return {pid for pid in children() if module in _words_after_m(pid)}


def _words_after_m(pid: int) -> list[str]:
    words = command(pid)
    return words[words.index("-m") + 1 :][:1] if "-m" in words else []


async def end(pids: Iterable[int], timeout: float) -> None:
    """Ask children to end, and kill and reap those that have not after ``timeout`` seconds."""
    pids = list(pids)
    kill(pids, signal.SIGTERM)
    waits = [asyncio.ensure_future(ended(pid)) for pid in pids]
    if waits:
        _, late = await asyncio.wait(waits, timeout=timeout)
        for wait in late:
            wait.cancel()
    kill(pids)
    for pid in pids:
        _reap(pid, timeout)


def end_in_order(pids: Iterable[int], timeout: float) -> None:
    """Ask children to end, and wait until they have, at most ``timeout`` seconds."""
    pids = list(pids)
    kill(pids, signal.SIGTERM)
    until = time.monotonic() + timeout
    for pid in pids:
        _reap(pid, until - time.monotonic())


def _parent(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(stat.rpartition(")")[2].split()[1])


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes; those that are gone are skipped."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_group(pid: int) -> None:
    """End every process of the group that ``pid`` leads or led."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def reap_orphans(own: Container[int]) -> None:
    """Reap ended orphans that this subreaper inherited, that is children that are not in ``own``."""
    for pid in children():
        if pid not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def end_orphans(own: Container[int], timeout: float) -> list[int]:
    """Kill and reap orphans, and those that they leave in turn; the pids still there after ``timeout``.

    A process that hangs in the kernel cannot be killed: its pid is returned.
    """
    until = time.monotonic() + timeout
    while orphans := [pid for pid in children() if pid not in own]:
        for pid in orphans:
            kill_group(pid)
            kill([pid])
            _reap(pid, until - time.monotonic())
        if time.monotonic() >= until:
            return orphans
    return []


def _reap(pid: int, seconds: float) -> None:
    """Wait for a child that was killed, at most so long."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if poll.poll(max(0.0, seconds) * 1000):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    finally:
        os.close(pidfd)


async def ended(pid: int) -> None:
    """Wait until a child process has ended, without reaping it."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


class Lifeline:
    """A pipe whose other end only one process holds: it closes when that process dies.

    Unlike a parent-death signal it also reaches grandchildren, and does not mistake the death of a
    thread or of an intermediate parent for the end.
    """

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_inheritable(self.read_fd, True)

    @staticmethod
    def watch(fd: int, gone: Callable[[], None]) -> None:
        """Call ``gone`` on the running event loop when the holder has died."""
        loop = asyncio.get_running_loop()

        def closed() -> None:
            loop.remove_reader(fd)
            gone()

        loop.add_reader(fd, closed)


def exit_reason(status: int) -> str:
    """How a process ended, from the status of `os.waitpid`, in words."""
    if os.WIFSIGNALED(status):
        return f"it was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"it left with exit code {os.WEXITSTATUS(status)}"
