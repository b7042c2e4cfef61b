"""The zygote: a process that forks workers, so that a restart costs no import.

The agent starts one with the names of the modules that the last run had imported. It imports them,
initialises no accelerator, and waits for orders on a socket. A worker is then a fork of it: there in
milliseconds. The first zygote of a job has imported nothing, so that the first run is as plain
``python`` would have it.

The protocol is one JSON object per frame (4 bytes of length, big-endian, then the text):

- to the zygote: ``{"spawn": id, ...}`` (see `Order`);
- from it: ``{"ready": seconds, "problem": text}``, ``{"started": id, "pid": n}``,
  ``{"exited": id, "status": wait status}``.

Only the standard library is imported here. When the agent dies the socket closes; the zygote then kills
its workers with their process groups and leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dlrover.agent import output
from dlrover.agent.preload import Preloaded, preload
from dlrover.elastic import bootstrap
from dlrover.elastic.progress import Board

PR_SET_PDEATHSIG = 1
COMMAND_LINE_ROOM = 2048
"""Bytes of padding in a zygote's arguments, so that its workers' command lines fit."""
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class Order:
    """One worker to start."""

    spawn: int
    """The agent's id for the worker."""
    entry: str
    target: str
    args: list[str]
    env: dict[str, str]
    stdout: str
    stderr: str
    error_file: str
    slot: int
    modules_file: str = ""
    cpus: list[int] = field(default_factory=list)
    """CPUs to run on; empty: as inherited."""
    save_at_breakpoint: bool = False
    node: str = ""
    """Which of the nodes on this machine the worker is on."""
    relay: str = ""
    """Where the worker's requests for data go."""
    round: int = 0
    auto_tuning: bool = False
    global_batch: int = 0
    stdout_overflow: str = ""
    """Where standard output goes while the disk of ``stdout`` is full."""
    stderr_overflow: str = ""


def pack(message: dict[str, Any]) -> bytes:
    """A frame of the protocol."""
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def frames(buffer: bytearray) -> list[dict[str, Any]]:
    """Take the complete frames out of ``buffer``."""
    found = []
    while len(buffer) >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(buffer)
        end = _LENGTH.size + length
        if len(buffer) < end:
            break
        found.append(json.loads(bytes(buffer[_LENGTH.size : end])))
        del buffer[:end]
    return found


class Zygote:
    """The process's state: its socket, and the workers it has forked."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._workers: dict[int, int] = {}  # pid -> the agent's id

    def serve(self) -> Order | None:
        """Obey until the socket closes, then kill what is left and return None.

        In a forked worker it returns the order that the worker is to carry out.
        """
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self._sock, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        buffer = bytearray()
        closed = False
        while not closed:
            for key, _ in selector.select():
                if key.fileobj is self._sock:
                    data = self._sock.recv(1 << 16)
                    closed = not data
                    buffer += data
                else:
                    os.read(wake_read, 1 << 10)
            for message in frames(buffer):
                order = Order(**message)
                if self._fork(order):
                    selector.close()
                    signal.set_wakeup_fd(-1)
                    os.close(wake_read)
                    os.close(wake_write)
                    return order
            self._reap()
        for pid in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        return None

    def _fork(self, order: Order) -> bool:
        """Fork; True in the new process."""
        with warnings.catch_warnings():
            # Python 3.12 warns of threads that a fork does not copy. `preload` has made sure that
            # there are none but those of libraries that handle forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            return True
        self._workers[pid] = order.spawn
        self.send({"started": order.spawn, "pid": pid})
        return False

    def _reap(self) -> None:
        while self._workers:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker = self._workers.pop(pid, None)
            if worker is not None:
                self.send({"exited": worker, "status": status})

    def send(self, message: dict[str, Any]) -> None:
        """Tell the agent something."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._sock.sendall(pack(message))  # a dead agent is noticed when reading


def become_worker(order: Order, board: Board, variables: Mapping[str, str | None]) -> None:
    """Run a worker's program in a process that `Zygote.serve` has forked.

    ``variables`` is what importing has changed in the environment.
    """
    _set_environment(order.env, variables)
    if order.entry == "command":
        _replace_by_command(order)
    module = ["-m"] if order.entry == "module" else []
    output.use_overflows(order.stdout_overflow, order.stderr_overflow)
    show_command_line([sys.executable, "-u", *module, order.target, *order.args])
    program = bootstrap.Program(
        entry=order.entry,
        target=order.target,
        args=order.args,
        error_file=order.error_file,
        slot=order.slot,
        modules_file=order.modules_file,
        save_at_breakpoint=order.save_at_breakpoint,
        node=order.node,
        relay=order.relay,
        round=order.round,
        auto_tuning=order.auto_tuning,
        global_batch=order.global_batch,
    )
    bootstrap.run(program, board)


def show_command_line(words: list[str]) -> None:
    """Make ``ps`` and ``pkill -f`` show a fork as the program that it runs, not as the zygote.

    The kernel reads a process's command line from where its arguments lie in memory: as many bytes as
    the zygote's own arguments take (`COMMAND_LINE_ROOM` among them) can be replaced.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    text = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _replace_by_command(order: Order) -> NoReturn:
    """Become another program; leave with a shell's exit code if that is not possible."""
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    try:
        os.execvpe(order.target, [order.target, *order.args], order.env)  # noqa: S606
    except OSError as error:
        print(f"{order.target} cannot be started: {error.strerror}", file=sys.stderr)  # noqa: T201
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def leave_zygote(order: Order, sock: socket.socket, zygote_pid: int) -> None:
    """Turn a forked process into one that has nothing in common with its zygote."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != zygote_pid:
        os._exit(1)  # the zygote died before the kernel knew that this process depends on it
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(
        signal.SIGHUP, signal.SIG_DFL
    )  # as under torchrun, also where nohup is the launcher's
    sock.close()
    output.redirect(order.stdout, order.stdout_overflow, 1)
    output.redirect(order.stderr, order.stderr_overflow, 2)
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)


def _set_environment(env: Mapping[str, str], imported: Mapping[str, str | None]) -> None:
    """Set the worker's environment as it would be after importing what its zygote has imported."""
    os.environ.clear()  # noqa: TID251
    os.environ.update(env)  # noqa: TID251
    for name, value in imported.items():
        if value is None:
            os.environ.pop(name, None)  # noqa: TID251
        else:
            os.environ[name] = value  # noqa: TID251


def main(sock_fd: int, board_fd: int, preload_file: str) -> None:
    """Run as the zygote on the given descriptors; returns in each worker when its program has ended."""
    zygote_pid = os.getpid()
    started = time.monotonic()
    # Somebody may have stopped this process: when the agent dies it has to go on, in order to end.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    imported = Preloaded()
    if sys.path[0] == "":
        del sys.path[0]  # what lies in the current directory is not what a program would import
    if preload_file:
        with open(preload_file, encoding="utf-8") as file:
            imported = preload(**json.load(file))
    sock = socket.socket(fileno=sock_fd)
    board = Board(board_fd)
    os.close(board_fd)  # the mapping has its own descriptor, which no other program inherits
    zygote = Zygote(sock)
    zygote.send({"ready": time.monotonic() - started, "problem": imported.problem})
    gc.freeze()  # what is shared with the workers stays shared
    order = zygote.serve()
    if order is None:
        os._exit(0)  # the exit handlers of what was imported are the workers' to run
    leave_zygote(order, sock, zygote_pid)
    imported.generators.renew()
    become_worker(order, board, imported.variables)
