"""A node's zygotes: which one starts the next workers, and the modules that the program is known to load."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from dlrover import __version__
from dlrover._util import procs
from dlrover._util.files import write_atomically
from dlrover.agent.workers.zygote import StartOrder
from dlrover.agent.workers.zygotes import OnExited, OnStarted, ZygoteProcess
from dlrover.errors import ConfigurationError
from dlrover.rpc.messages import MODULES_LIMIT
from dlrover.spec.job import Entry, LaunchSpec

logger = logging.getLogger(__name__)


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
        except (OSError, ConfigurationError) as error:  # it starts without them
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


def content(listed: Path) -> bytes:
    """Return a list that a worker has written, for other nodes; empty if it cannot be read or is too long."""
    try:
        data = listed.read_bytes()
    except OSError as error:
        logger.info("The list of modules is not passed on: %s", error)
        return b""
    return data if len(data) <= MODULES_LIMIT else b""


class ModuleList:
    """The list of one program, in the user's cache; nothing is kept without a cache, or for a command.

    A program is known by its entry, file, interpreter and search path, and by the version of DLRover.
    """

    def __init__(
        self, cache: Path | None, launch: LaunchSpec, python: str, search_path: str
    ) -> None:
        self._file: Path | None = None
        if cache is not None and launch.entry is not Entry.COMMAND:
            target = launch.target
            if launch.entry is not Entry.MODULE:
                target = os.path.abspath(target)
            key = json.dumps([launch.entry.value, target, python, search_path, __version__])
            name = hashlib.sha256(key.encode()).hexdigest()[:32]
            self._file = cache / "modules" / f"{name}.json"

    def find(self) -> str:
        """Return the path of the list; empty if there is none."""
        return str(self._file) if self._file is not None and self._file.is_file() else ""

    def keep(self, listed: Path) -> None:
        """Copy a list that a worker has written; a cache that cannot be written keeps nothing."""
        if self._file is None:
            return
        try:
            data = listed.read_bytes()
            with contextlib.suppress(FileNotFoundError):
                if self._file.read_bytes() == data:
                    return
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self._file, data, 0o600)
        except OSError as error:
            logger.info("The list of modules is not kept for the next run: %s", error)

    def forget(self) -> None:
        """Delete the list: forks with these modules would differ from new processes."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
