"""The zygote: a process that forks workers, so that a restart costs no import.

The agent starts a zygote with the names of the modules that the last run imported. The zygote imports
them, initialises no accelerator, and waits for orders on a socket. A worker is a fork of it, ready within
milliseconds. The first zygote of a job imports nothing, so that the first run behaves as under plain
``python``.

The protocol is one JSON object per frame (`dlrover._util.framing`):

- to the zygote: ``{"spawn": id, ...}`` (see `StartOrder`);
- from it: ``{"ready": seconds, "problem": text}``, ``{"started": id, "pid": n}``,
  ``{"exited": id, "status": wait status}``.

Apart from DLRover's own modules, only the standard library is imported here. When the agent dies, the
socket closes; the zygote then kills its workers with their process groups and exits.
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
import sys
import time
import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dlrover import launched
from dlrover._util import framing, procs
from dlrover.agent.workers import output
from dlrover.agent.workers.preload import Preloaded, preload
from dlrover.training.worker import bootstrap
from dlrover.training.worker.progress import Board

PR_SET_PDEATHSIG = 1
COMMAND_LINE_ROOM = 2048
"""Bytes of padding in a zygote's arguments, which make room for its workers' command lines."""


@dataclass(frozen=True)
class StartOrder:
    """An order to start one worker."""

    spawn: int
    """The agent's id for the worker."""
    program: bootstrap.Program
    env: dict[str, str]
    stdout: str
    stderr: str
    cpus: list[int] = field(default_factory=list)
    """CPUs to run on; if empty, the inherited affinity remains."""
    stdout_overflow: str = ""
    """Path to which standard output goes while the disk of ``stdout`` is full."""
    stderr_overflow: str = ""

    @classmethod
    def unpack(cls, message: dict[str, Any]) -> StartOrder:
        """Return the order that `dataclasses.asdict` made ``message`` of."""
        program = message["program"]
        program["given"] = launched.Given(**program["given"])
        return cls(**{**message, "program": bootstrap.Program(**program)})


def pack(message: dict[str, Any]) -> bytes:
    """Encode a message as a frame of the protocol."""
    return framing.pack(json.dumps(message).encode())


def frames(buffer: bytearray) -> list[dict[str, Any]]:
    """Remove the complete frames from ``buffer`` and return their messages."""
    return [json.loads(message) for message in framing.take(buffer)]


class Zygote:
    """The state of a zygote process: its socket and the workers that it has forked."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._workers: dict[int, int] = {}  # pid -> the agent's id

    def serve(self) -> StartOrder | None:
        """Carry out orders until the socket closes, then kill the remaining workers and return None.

        In a forked worker, return the worker's order.
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
                    try:
                        data = self._sock.recv(1 << 16)
                    except ConnectionResetError:
                        data = b""  # the agent has left and did not read the last message
                    closed = not data
                    buffer += data
                else:
                    os.read(wake_read, 1 << 10)
            for message in frames(buffer):
                order = StartOrder.unpack(message)
                if self._fork(order):
                    selector.close()
                    signal.set_wakeup_fd(-1)
                    os.close(wake_read)
                    os.close(wake_write)
                    return order
            self._reap()
        for pid in self._workers:
            procs.kill_group(pid)
        return None

    def _fork(self, order: StartOrder) -> bool:
        """Fork a worker; return True in the new process."""
        with warnings.catch_warnings():
            # Python 3.12 warns of threads that a fork does not copy. `preload` has ensured that
            # only libraries that handle forks have any.
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
        """Send a message to the agent."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._sock.sendall(pack(message))  # a dead agent is noticed when reading


def become_worker(
    order: StartOrder, board: Board, variables: Mapping[str, str | None], loaded: Sequence[str]
) -> None:
    """Run a worker's program in a process forked by `Zygote.serve`.

    ``variables`` are the zygote's environment variables that its imports changed, ``loaded`` the modules that it had
    loaded before these.
    """
    program = order.program
    _set_environment(order.env, variables)
    if program.entry == "command":
        _replace_by_command(order)
    module = ["-m"] if program.entry == "module" else []
    output.use_overflows(order.stdout_overflow, order.stderr_overflow)
    show_command_line([sys.executable, "-u", *module, program.target, *program.args])
    bootstrap.run(program, board, loaded)


def show_command_line(words: list[str]) -> None:
    """Set the command line that ``ps`` and ``pkill -f`` show for a fork, in place of the zygote's.

    The kernel reads a process's command line from its arguments in memory. The new one is cut to the size
    of the zygote's own arguments, which include the padding of `COMMAND_LINE_ROOM`.
    """
    fields = procs.stat(os.getpid())
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    text = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _replace_by_command(order: StartOrder) -> NoReturn:
    """Replace the process with another program; if that fails, exit with a shell's exit code."""
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    program = order.program
    try:
        os.execvpe(program.target, [program.target, *program.args], order.env)  # noqa: S606
    except OSError as error:
        print(f"{program.target} cannot be started: {error.strerror}", file=sys.stderr)  # noqa: T201
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def leave_zygote(order: StartOrder, sock: socket.socket, zygote_pid: int) -> None:
    """Separate a forked process from its zygote: session, signals, socket, output and CPU affinity."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != zygote_pid:
        os._exit(1)  # the zygote died before the death signal was set
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # As under torchrun, even if the launcher runs under nohup.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sock.close()
    output.redirect(order.stdout, order.stdout_overflow, 1)
    output.redirect(order.stderr, order.stderr_overflow, 2)
    if order.cpus:
        os.sched_setaffinity(0, order.cpus)


def _set_environment(env: Mapping[str, str], imported: Mapping[str, str | None]) -> None:
    """Set the worker's environment as the zygote's imports would have left it."""
    os.environ.clear()  # noqa: TID251
    os.environ.update(env)  # noqa: TID251
    for name, value in imported.items():
        if value is None:
            os.environ.pop(name, None)  # noqa: TID251
        else:
            os.environ[name] = value  # noqa: TID251


def main(sock_fd: int, board_fd: int, preload_file: str, at_start: Container[str]) -> None:
    """Run as the zygote on the given descriptors; return in each worker when its program has ended.

    ``at_start``: the modules that the interpreter had loaded before DLRover's.
    """
    zygote_pid = os.getpid()
    loaded = [
        name for name in sys.modules if name not in at_start and name in sys.stdlib_module_names
    ]
    started = time.monotonic()
    # This process may be stopped (SIGSTOP): when the agent dies, it must continue in order to end.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    imported = Preloaded()
    if preload_file:
        with open(preload_file, encoding="utf-8") as file:
            imported = preload(**json.load(file))
    sock = socket.socket(fileno=sock_fd)
    board = Board(board_fd)
    os.close(board_fd)  # the mapping has its own descriptor, which other programs do not inherit
    zygote = Zygote(sock)
    zygote.send({"ready": time.monotonic() - started, "problem": imported.problem})
    gc.freeze()  # keeps the memory shared with the workers
    order = zygote.serve()
    if order is None:
        os._exit(0)  # only the workers run the imported modules' exit handlers
    leave_zygote(order, sock, zygote_pid)
    imported.generators.renew()
    become_worker(order, board, imported.variables, loaded)
