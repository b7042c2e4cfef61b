"""The agent's side of its zygotes: starts them, chooses one, sends it orders, and receives the fate of its workers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from dlrover._util import kernel, procs, start
from dlrover.agent.workers.modules import ModuleList, content
from dlrover.agent.workers.zygote import COMMAND_LINE_ROOM, StartOrder, frames, pack
from dlrover.errors import DLRoverError
from dlrover.spec.job import Entry, LaunchSpec
from dlrover.training.worker.progress import BOARD_BYTES

logger = logging.getLogger(__name__)

ZYGOTE = "zygote.main("
"""Text in the command line of every zygote, but of no worker."""

# As `dlrover._util.start` starts a process, but with the search path of the program in the end. This package may not be
# installed in the interpreter (PYTHON_EXEC). Nothing else is imported before the standard library is first.
_START = (
    "import sys; first = set(sys.modules); sys.path[:1] = filter(None, sys.path[:1]); path = sys.path[:]; "
    "import _frozen_importlib_external as files; start = dict(__name__='start', __file__={start!r}); "
    "exec(files.SourceFileLoader('start', {start!r}).get_code('start'), start); "
    "start['standard_library_first'](); start['load_package'](); "
    "from dlrover.agent.workers import zygote; sys.path[:] = path; "
    + ZYGOTE
    + "{sock}, {board}, {preload!r}, first)"
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
        on_unfit: Callable[[list[StartOrder]], None] | None = None,
    ) -> None:
        """Start the process.

        With ``on_unfit``, workers are held back until the zygote is ready. If its forks would differ from
        new processes, or if it is not ready in time, `problem` gives the reason and ``on_unfit`` is called
        with the workers' orders. A late zygote can be used once it is ready.
        """
        self.ready = False
        self._on_unfit = on_unfit
        self._held: list[StartOrder] = []
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
                [python, "-u", "-c", code + " " * COMMAND_LINE_ROOM],
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

    def spawn(self, order: StartOrder) -> None:
        """Start a worker, now or once the zygote is ready."""
        if self.ready or self._on_unfit is None:
            self.workers.add(order.spawn)
            self._unsent += pack(asdict(order))
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

    def take_held(self) -> list[StartOrder]:
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
        for message in frames(self._buffer):
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


class ZygotePool:
    """The zygotes of one node: a cold one has loaded nothing, a warm one what the program imports."""

    def __init__(
        self,
        launch: LaunchSpec,
        base_env: Mapping[str, str],
        board_fd: int,
        cache: Path | None,
        on_started: OnStarted,
        on_exited: OnExited,
    ) -> None:
        self.listed = b""
        """List of the modules that the program has loaded on this node; empty while unknown."""
        self._base_env = base_env
        self._board_fd = board_fd
        self._on_started = on_started
        self._on_exited = on_exited
        self._forks = launch.entry is not Entry.COMMAND
        self._python = launch.python or sys.executable
        self._modules = ModuleList(cache, launch, self._python, base_env.get("PYTHONPATH", ""))
        self._modules_file = ""
        self._cold: ZygoteProcess | None = None
        self._warm: ZygoteProcess | None = None
        self._retired: list[ZygoteProcess] = []

    # ---- start

    def prepare(self) -> None:
        """Start a zygote before the first round, with the modules of the program's last run."""
        if self._cold is None and self._warm is None:
            if known := self._modules.find():
                self._warm = self._start(known)
            else:
                self._cold = self._start("")

    def preload(self, listed: bytes, path: Path) -> None:
        """Start a zygote with a list of modules that the program has loaded on another node; keep it at ``path``."""
        if not listed or self._warm is not None or not self._forks:
            return
        try:
            path.write_bytes(listed)
            self._warm = self._start(str(path))
        except (OSError, DLRoverError) as error:  # it starts without them
            logger.warning("The spare cannot load what the program needs: %s", error)

    def warm_up(self, listed: Path, has_been: Callable[[], bool]) -> None:
        """Start a zygote with the workers' imports once the workers have listed them; ``has_been`` returns whether."""
        if not self._forks:
            return
        if self._warm is not None and self._warm.problem:
            self._modules.forget()
        if str(listed) != self._modules_file and has_been():
            self._modules_file = str(listed)  # one attempt per list: importing may crash
            self._modules.keep(listed)
            self.listed = content(listed)
            if self._warm is None:
                self._warm = self._start(str(listed))

    def _start(self, preload_file: str) -> ZygoteProcess:
        return ZygoteProcess(
            self._python,
            self._base_env,
            self._board_fd,
            preload_file,
            self._on_started,
            self._on_exited,
            self._lost,
            self._start_cold if preload_file else None,
        )

    # ---- workers

    def pick(self) -> ZygoteProcess:
        """Return the warmest zygote: even one still importing is ready before a worker that starts now."""
        warm = self._warm
        if warm is not None and not warm.problem:
            if self._cold is not None and warm.ready and not self._cold.workers:
                self._retire(self._cold)
                self._cold = None
            return warm
        return self.cold()

    def cold(self) -> ZygoteProcess:
        """Return a zygote that has loaded nothing yet."""
        if self._cold is None:
            self._cold = self._start("")
        return self._cold

    def _start_cold(self, orders: list[StartOrder]) -> None:
        """Start workers from the cold zygote: the warm one is unfit or late."""
        for order in orders:
            self.cold().spawn(order)

    def doubt(self) -> None:
        """Start afresh if no worker has come to a step: the modules of the last run may be the reason."""
        if self._warm is not None and not self._modules_file:
            self._modules.forget()
            self.discard()

    def take_held(self) -> list[StartOrder]:
        """Remove and return the orders of the workers that wait for a zygote."""
        return self._warm.take_held() if self._warm is not None else []

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the zygotes."""
        procs.kill((z.process.pid for z in (self._cold, self._warm) if z is not None), number)

    # ---- end

    def discard(self) -> None:
        """Retire all zygotes, so that the next workers start from a process that has loaded nothing yet."""
        for zygote in (self._cold, self._warm):
            if zygote is not None:
                self._retire(zygote)
        self._cold = self._warm = None

    def _retire(self, zygote: ZygoteProcess) -> None:
        zygote.close()
        self._retired.append(zygote)

    def _lost(self, zygote: ZygoteProcess) -> None:
        """Handle the death of a zygote, with which its workers died."""
        problem = zygote.start_problem()
        self._retire(zygote)
        if zygote is self._warm:
            self._warm = None
            self._modules.forget()
        elif zygote is self._cold:
            self._cold = None
        for worker in sorted(zygote.workers):
            self._on_exited(worker, int(signal.SIGKILL), problem)

    def pids(self) -> set[int]:
        """Return the pids of the zygotes, also of retired ones that have not ended."""
        self._retired = [z for z in self._retired if z.process.poll() is None]
        alive = [self._cold, self._warm, *self._retired]
        return {z.process.pid for z in alive if z is not None}

    async def close(self) -> None:
        """End all zygotes."""
        self.discard()
        for zygote in self._retired:
            await zygote.wait()


def make_board() -> int:
    """Return the descriptor of a new progress board in anonymous memory, whose size no worker can change.

    The agent maps it, and would end by SIGBUS where memory is missing.
    """
    fd = kernel.memfd_create("dlrover-progress", kernel.MFD_CLOEXEC | kernel.MFD_ALLOW_SEALING)
    os.ftruncate(fd, BOARD_BYTES)
    kernel.fix_size(fd)
    os.set_inheritable(fd, True)
    return fd
