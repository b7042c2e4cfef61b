"""The agent's side of a zygote: starts it, sends it orders, and receives the fate of its workers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from dlrover._util import kernel, procs, start
from dlrover.agent.workers import zygote
from dlrover.training.worker.progress import BOARD_BYTES

logger = logging.getLogger(__name__)

# As `dlrover._util.start` starts a process, but with the search path of the program in the end. This package may not be
# installed in the interpreter (PYTHON_EXEC). Nothing else is imported before the standard library is first.
_START = (
    "import sys; first = set(sys.modules); sys.path[:1] = filter(None, sys.path[:1]); path = sys.path[:]; "
    "import _frozen_importlib_external as files; start = dict(__name__='start', __file__={start!r}); "
    "exec(files.SourceFileLoader('start', {start!r}).get_code('start'), start); "
    "start['standard_library_first'](); start['load_package'](); "
    "from dlrover.agent.workers import zygote; sys.path[:] = path; zygote.main({sock}, {board}, {preload!r}, first)"
)

END_WAIT = 1.0
"""Seconds to wait for the end of a process whose socket has closed."""

READY_WAIT = 60.0
"""Seconds in all that workers wait for an importing zygote, which started before they could."""

OnStarted = Callable[[int, int], None]
"""Callback with a worker's id and pid."""
OnExited = Callable[[int, int, str], None]
"""Callback with a worker's id and wait status, and why it could not be started, otherwise an empty text."""


class ZygoteProcess:
    """One zygote process, from its start to its end."""

    def __init__(  # noqa: PLR0913 - each is needed once
        self,
        python: str,
        env: Mapping[str, str],
        board_fd: int,
        preload_file: str,
        on_started: OnStarted,
        on_exited: OnExited,
        on_lost: Callable[[ZygoteProcess], None],
        on_unfit: Callable[[list[zygote.StartOrder]], None] | None = None,
    ) -> None:
        """Start the process.

        With ``on_unfit``, workers are held back until the zygote is ready. If its forks would differ from
        new processes, or if it is not ready in time, `problem` gives the reason and ``on_unfit`` is called
        with the workers' orders. A late zygote can be used once it is ready.
        """
        self.ready = False
        self._on_unfit = on_unfit
        self._held: list[zygote.StartOrder] = []
        self._timer: asyncio.TimerHandle | None = None
        self._python = python
        self.problem = ""
        self.workers: set[int] = set()
        self._on_started, self._on_exited, self._on_lost = on_started, on_exited, on_lost
        self._buffer, self._unsent = bytearray(), bytearray()
        ours, theirs = socket.socketpair()
        code = _START.format(
            start=start.__file__, sock=theirs.fileno(), board=board_fd, preload=preload_file
        )
        with theirs:
            self.process = subprocess.Popen(
                [python, "-u", "-c", code + " " * zygote.COMMAND_LINE_ROOM],
                env=dict(env),
                pass_fds=(theirs.fileno(), board_fd),
                start_new_session=True,
                # The worker's log already has the output of the first import of these modules.
                stdout=subprocess.DEVNULL if preload_file else None,
                stderr=subprocess.DEVNULL if preload_file else None,
            )
        ours.setblocking(False)
        self._socket = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive)

    def spawn(self, order: zygote.StartOrder) -> None:
        """Start a worker, now or once the zygote is ready."""
        if self.ready or self._on_unfit is None:
            self.workers.add(order.spawn)
            self._unsent += zygote.pack(asdict(order))
            self._send()
            return
        if self.problem:
            self._on_unfit([order])
            return
        if self._timer is None:
            logger.info(
                "The workers wait for zygote %d, %g s at most", self.process.pid, READY_WAIT
            )
            self._timer = asyncio.get_running_loop().call_later(READY_WAIT, self._expire)
        self._held.append(order)

    def _expire(self) -> None:
        self.problem = f"it was not ready after {READY_WAIT:g} s"
        logger.warning(
            "Zygote %d is not ready after %g s: until it is, workers start without it",
            self.process.pid, READY_WAIT,
        )  # fmt: skip
        self.release()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def take_held(self) -> list[zygote.StartOrder]:
        """Remove and return the orders of the workers that are held back."""
        held, self._held = self._held, []
        return held

    def release(self) -> None:
        """Start the workers that are held back: from this zygote if it is fit, else via ``on_unfit``."""
        held = self.take_held()
        if self.ready and not self.problem:
            for order in held:
                self.spawn(order)
        elif held and self._on_unfit is not None:
            self._on_unfit(held)

    def start_problem(self) -> str:
        """Return why the process, whose socket has closed, never got ready; empty if it did or was killed."""
        try:
            code = self.process.wait(END_WAIT)
        except subprocess.TimeoutExpired:
            return ""
        if self.ready or code <= 0:
            return ""
        return (
            f"the interpreter {self._python} left with exit code {code} before it ran the program"
        )

    def close(self) -> None:
        """Close the socket, on which the zygote kills its remaining workers and ends."""
        self._stop_timer()
        if self._socket.fileno() >= 0:
            self._leave_loop()
        self._socket.close()
        self.process.send_signal(signal.SIGCONT)  # a stopped process would not notice
        if not self.ready:
            self.process.kill()  # it has no workers yet, and would finish its imports first

    async def wait(self) -> None:
        """Wait until the process has ended."""
        if self.process.poll() is None:
            await procs.ended(self.process.pid)
            self.process.wait()

    def _send(self) -> None:
        """Send what the zygote takes now, and the rest as it reads: it may itself wait for this end to read."""
        loop = asyncio.get_running_loop()
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            loop.add_writer(self._socket.fileno(), self._send)
            return
        except OSError as error:
            logger.warning("The zygote %d does not take orders: %s", self.process.pid, error)
            self._unsent.clear()
        loop.remove_writer(self._socket.fileno())

    def _leave_loop(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        loop.remove_writer(self._socket.fileno())

    def _receive(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self._leave_loop()
            self._on_lost(self)
            self.release()
            return
        self._buffer += data
        for message in zygote.frames(self._buffer):
            self._take(message)

    def _take(self, message: dict[str, object]) -> None:
        if "ready" in message:
            self.ready = True
            self._stop_timer()
            self.problem = str(message["problem"])
            if self.problem:
                logger.warning("Restarts will import everything again: %s", self.problem)
            logger.info("Zygote %d is ready after %s s", self.process.pid, message["ready"])
            self.release()
        elif "started" in message:
            self._on_started(int(str(message["started"])), int(str(message["pid"])))
        elif "exited" in message:
            worker = int(str(message["exited"]))
            self.workers.discard(worker)
            self._on_exited(worker, int(str(message["status"])), "")


def make_board() -> int:
    """Return the descriptor of a new progress board in anonymous memory, whose size no worker can change.

    The agent maps it, and would end by SIGBUS where memory is missing.
    """
    fd = kernel.memfd_create("dlrover-progress", kernel.MFD_CLOEXEC | kernel.MFD_ALLOW_SEALING)
    os.ftruncate(fd, BOARD_BYTES)
    kernel.fix_size(fd)
    os.set_inheritable(fd, True)
    return fd


def read_json(path: Path) -> object:
    """Return the JSON value in a file; None if the file is missing or incomplete."""
    try:
        return json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError):
        return None
