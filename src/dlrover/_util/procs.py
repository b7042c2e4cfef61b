"""Process helpers: signals, ends, orphans and lifelines.

Zygotes import this module, so it loads asyncio only where an event loop runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path

from dlrover._util import kernel

PR_SET_CHILD_SUBREAPER = 36
LOOK_INTERVAL = 0.05
"""Seconds between looks at a process where the kernel does not say when it ends: a sandbox may refuse that."""


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of the system's init."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def open_standard_streams() -> None:
    """Open the null device in place of each standard stream that this process was started without.

    Call it first: otherwise another file gets the number, and children use that file as their stream. What the
    locale's encoding lacks is written as escapes, as Python does on standard error.
    """
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        null = os.open(os.devnull, os.O_RDWR)
        if null != fd:
            os.dup2(null, fd)
            os.close(null)
        os.set_inheritable(fd, True)
        setattr(sys, name, open(fd, mode, closefd=False))  # noqa: SIM115 - open for the process's lifetime
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def leave(number: int, _frame: object) -> None:
    """Exit on a signal in an orderly way; the first process of a container gets only signals that it handles."""
    raise SystemExit(128 + number)


def survives_hangup(number: signal.Signals) -> bool:
    """Return whether this is SIGHUP and it is ignored, as under nohup."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def stat(pid: int) -> list[str]:
    """Return the fields of a process's stat file (proc(5)) from its state on; empty if it has ended or is hidden.

    Its name, which comes before, is bytes of any kind.
    """
    try:
        content = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return content.rpartition(b")")[2].decode().split()


def start_time(pid: int) -> int:
    """Return the start time of process ``pid``, in clock ticks since boot; 0 if it does not exist.

    Pid and start time together identify a process for ever; the pid alone is reused.
    """
    fields = stat(pid)
    return int(fields[19]) if fields else 0


def runs(pid: int, started: int) -> bool:
    """Return whether the process ``pid`` with this start time still runs; an unreaped one does not."""
    fields = stat(pid)
    return bool(fields) and fields[0] != "Z" and int(fields[19]) == started


def pids() -> list[int]:
    """Return the pids of all processes visible to this one."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def command(pid: int) -> list[str]:
    """Return the words of a process's command; empty if it has ended or may not be read."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return words[:-1]


def option(command: Sequence[str], name: str) -> str:
    """Return the value of an option in the words of a command; empty if it has none."""
    return command[command.index(name) + 1] if name in command[:-1] else ""


def children() -> list[int]:
    """Return the pids of this process's children."""
    me = os.getpid()
    return [pid for pid in pids() if parent(pid) == me]


def running(module: str, among: Iterable[int] | None = None) -> set[int]:
    """Return the pids of processes that are ``python -m module``, by default of this process's children."""
    among = children() if among is None else among
    return {pid for pid in among if module in _words_after_m(pid)}


def is_own(pid: int) -> bool:
    """Return whether a process runs and is of this process's user."""
    try:
        return Path(f"/proc/{pid}").stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _words_after_m(pid: int) -> list[str]:
    words = command(pid)
    return words[words.index("-m") + 1 :][:1] if "-m" in words else []


async def end(pids: Iterable[int], timeout: float) -> None:
    """Ask processes to end; after ``timeout`` seconds, kill those still running. Reap children."""
    import asyncio  # noqa: PLC0415 - not in zygotes

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
    """Ask children to end, and wait for all of them, at most ``timeout`` seconds."""
    pids = list(pids)
    kill(pids, signal.SIGTERM)
    until = time.monotonic() + timeout
    for pid in pids:
        _reap(pid, until - time.monotonic())


def parent(pid: int) -> int:
    """Return the pid of a process's parent; 0 if it has ended."""
    fields = stat(pid)
    return int(fields[1]) if fields else 0


def kill(pids: Iterable[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes; skip those that are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_group(pid: int) -> None:
    """Kill every process of the group that ``pid`` leads or led, except those that clean up after it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if not any(_cleans_up(member) for member in _group(pid) if member != pid):
            os.killpg(pid, signal.SIGKILL)
            return
        os.killpg(pid, signal.SIGSTOP)  # none forks meanwhile
    members = _group(pid)
    spared = {member for member in members if member != pid and _cleans_up(member)}
    # The leader last: if this process dies before, whoever waits for the leader kills the group again.
    for member in sorted(members, key=lambda member: (member not in spared, member == pid)):
        with contextlib.suppress(PermissionError):
            kill([member], signal.SIGCONT if member in spared else signal.SIGKILL)


def _group(leader: int) -> list[int]:
    """Return the members of the group that ``leader`` leads or led."""
    members = []
    for pid in pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == leader:
                members.append(pid)
    return members


def _cleans_up(pid: int) -> bool:
    """Return whether this is a process of multiprocessing, joblib or PyTorch that cleans up after a program.

    It frees the program's shared memory and semaphores when all processes that use them have ended, and then ends.
    """
    words = command(pid)
    is_tracker = option(words, "-c").partition(";")[0].endswith(".resource_tracker import main")
    return is_tracker or os.path.basename("".join(words[:1])) == "torch_shm_manager"


def reap_orphans(own: Container[int]) -> None:
    """Reap the ended orphans of this subreaper: its children that are not in ``own``."""
    for pid in children():
        if pid not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def end_orphans(own: Container[int], timeout: float) -> list[int]:
    """Kill and reap orphans, and their orphans in turn; return the pids left after ``timeout`` seconds.

    A process that hangs in the kernel cannot be killed, so its pid is returned. Those that clean up are spared.
    """
    until = time.monotonic() + timeout
    while orphans := [pid for pid in children() if pid not in own and not _cleans_up(pid)]:
        for pid in orphans:
            kill_group(pid)
            kill([pid])
            _reap(pid, until - time.monotonic())
        if time.monotonic() >= until:
            return orphans
    return []


def wait_for_cleaners(timeout: float) -> list[int]:
    """Wait until the children that clean up have ended; reap them. Return the pids left after ``timeout`` seconds."""
    until = time.monotonic() + timeout
    for pid in [pid for pid in children() if _cleans_up(pid)]:
        _reap(pid, until - time.monotonic())
    return [pid for pid in children() if _cleans_up(pid)]


def _reap(pid: int, seconds: float) -> None:
    """Wait at most ``seconds`` for a child to end, and reap it."""
    until = time.monotonic() + seconds
    try:
        pidfd = kernel.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # refused
        started = start_time(pid)
        while runs(pid, started) and time.monotonic() < until:
            time.sleep(LOOK_INTERVAL)  # noqa: TID251 - there is no event
    else:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)
        os.close(pidfd)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


async def ended(pid: int) -> None:
    """Wait until a process ends, without reaping it."""
    import asyncio  # noqa: PLC0415 - not in zygotes

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    try:
        pidfd = kernel.pidfd_open(pid)
    except ProcessLookupError:  # no child, which would stay until it is reaped
        return
    except OSError:  # refused
        started = start_time(pid)
        while runs(pid, started):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(LOOK_INTERVAL)
        return
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


class Lifeline:
    """A pipe whose write end only one process holds; it closes when that process dies.

    Unlike a parent-death signal, it also reaches grandchildren, and ignores the death of a mere thread or of
    an intermediate parent.
    """

    def __init__(self) -> None:
        self.read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_inheritable(self.read_fd, True)

    def close(self) -> None:
        """Let go of whoever holds the other end."""
        os.close(self._write_fd)
        os.close(self.read_fd)

    @staticmethod
    def watch(fd: int, gone: Callable[[], None]) -> None:
        """Call ``gone`` on the running event loop when the holder dies."""
        import asyncio  # noqa: PLC0415 - not in zygotes

        loop = asyncio.get_running_loop()

        def closed() -> None:
            loop.remove_reader(fd)
            gone()

        loop.add_reader(fd, closed)

    @staticmethod
    def is_cut(fd: int) -> bool:
        """Return whether the holder has died, also before ``watch`` has said it."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))


def exit_reason(status: int) -> str:
    """Describe how a process ended, from the status of `os.waitpid`."""
    if os.WIFSIGNALED(status):
        return f"it was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"it left with exit code {os.WEXITSTATUS(status)}"
