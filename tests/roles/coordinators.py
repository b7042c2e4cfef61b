"""The service of a job of several roles, as its coordinator runs it, and processes of roles beside it."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlrover.roles.runtime import environment
from dlrover.roles.serving import RolesService
from dlrover.rpc.server import Server
from dlrover.spec.jobdir import JobDir

TOKEN = "a-token-of-tests"


class FileOfInputs:
    """A journal in a file, which outlives its service."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute("CREATE TABLE IF NOT EXISTS entries (seq INTEGER PRIMARY KEY, body BLOB)")

    def append(self, entry: bytes, now: float) -> None:
        self._db.execute("INSERT INTO entries (body) VALUES (?)", (entry,))

    def entries(self) -> list[bytes]:
        return [row[0] for row in self._db.execute("SELECT body FROM entries ORDER BY seq")]

    def close(self) -> None:
        self._db.close()


@dataclass
class Coordinator:
    """A service on an event loop in a thread; `restart` replaces it by another one from its journal."""

    directory: JobDir
    port: int = 0
    processes: dict[tuple[str, int], subprocess.Popen[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory.path.mkdir(parents=True, exist_ok=True)
        self.directory.token.write_text(TOKEN)
        self.start()

    def start(self) -> None:
        self.journal = FileOfInputs(self.directory.journal)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.run(self._serve)

    async def _serve(self) -> None:
        self.service = RolesService(self.journal, self.journal.entries())
        self._server = Server(TOKEN, program="coordinator")
        self.service.register(self._server)
        self.port = await self._server.start("127.0.0.1", self.port)
        self.service.begin()

    def stop(self) -> None:
        """End the service as SIGKILL does: open calls break."""

        async def end() -> None:
            self.service.close()
            await self._server.stop(0)
            self.journal.close()

        self.run(end)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def run(self, what: Callable[[], Any]) -> Any:
        """Call something on the service's loop."""

        async def called() -> Any:
            found = what()
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result(30)

    @property
    def status(self) -> Any:
        return self.run(self.service.snapshot)

    def validate(self) -> None:
        self.run(self.service.shared.validate)

    # ---- processes

    def variables(self, role: str, index: int, attempt: int, instances: int) -> dict[str, str]:
        found = environment.variables(
            f"127.0.0.1:{self.port}", self.directory.token, role, attempt, job="test"
        )
        return {**found, "ROLE_RANK": str(index), "ROLE_WORLD_SIZE": str(instances)}

    def launch(
        self, role: str, index: int, target: str, attempt: int = 1, instances: int = 1, *args: str
    ) -> subprocess.Popen[str]:
        """Start an instance: ``module:Class`` or a script."""
        self.run(lambda: self.service.started(role, index, attempt))
        command = ["-m", "dlrover.roles.runtime.serve"] if not target.endswith(".py") else []
        env = {
            **os.environ,
            **self.variables(role, index, attempt, instances),
            "PYTHONPATH": str(self.directory.path),
        }
        process = subprocess.Popen(
            [sys.executable, *command, target, *args],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.directory.path,
        )  # fmt: skip
        self.processes[role, index] = process
        return process

    def kill(self, role: str, index: int, attempt: int = 1, *, told: bool = True) -> None:
        """Kill an instance; the coordinator learns why, if it is ``told``."""
        process = self.processes.pop((role, index))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if told:
            reason = "it was killed by SIGKILL"
            self.run(lambda: self.service.ended(role, index, attempt, reason, 0))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()
        self.validate()
        self.stop()


@contextmanager
def coordinator(path: Path) -> Iterator[Coordinator]:
    made = Coordinator(JobDir(path / "job"))
    try:
        yield made
    finally:
        made.close()
