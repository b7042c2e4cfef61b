"""The service of a job of several roles, as its coordinator runs it, and processes of roles beside it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dlrover.roles.coordinator.health import HealthWatch
from dlrover.roles.coordinator.journal import RolesJournal
from dlrover.roles.machine.health import Stuck
from dlrover.roles.messages import HOLDER, MemberEnded, MemberPlace, MemberStarted
from dlrover.roles.runtime import environment, holder, worker
from dlrover.roles.runtime.worker import RoleWorker
from dlrover.roles.serving import Loss, RolesService
from dlrover.roles.spec import RolesJob
from dlrover.rpc.server import Server
from dlrover.spec.jobdir import JobDir, TlsFiles
from tests.support import certificates

TOKEN = "a-token-of-tests"


@dataclass
class Coordinator:
    """A service on an event loop in a thread; `restart` replaces it by another one from its journal."""

    directory: JobDir
    port: int = 0
    processes: dict[tuple[str, int], subprocess.Popen[str]] = field(default_factory=dict)
    lifeline: tuple[int, int] = (-1, -1)
    """With one, the service keeps a process for weights, which ends with it."""
    secured: bool = True
    """It has TLS."""
    losses: list[Loss] = field(default_factory=list)
    _launched: dict[tuple[str, int], tuple[int, str, int, tuple[str, ...]]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self.directory.path.mkdir(parents=True, exist_ok=True)
        self.directory.token.write_text(TOKEN)
        self.tls = certificates.made(self.directory.path) if self.secured else TlsFiles()
        self.start()

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.run(self._serve)

    async def _serve(self) -> None:
        self.journal = RolesJournal(self.directory.journal)
        entries = [entry for _, entry in self.journal.entries() if isinstance(entry, bytes)]
        self.service = RolesService(self.journal, entries)
        self.service.on_loss = self.losses.append
        self._server = Server(TOKEN, self.tls, program="coordinator")
        self.service.register(self._server)
        self._health = HealthWatch(RolesJob(name="test", roles=()), self._stuck, lambda _: None)
        self._health.register(self._server)
        self.port = await self._server.start("127.0.0.1", self.port)
        self.service.begin()
        self._tasks = [asyncio.create_task(self._health.run())]
        if (known := self.service.shared.members.get(HOLDER, 0)) is not None:
            self._health.tell(MemberStarted(known.place))
        if self.lifeline[0] >= 0:
            variables = self.variables(HOLDER, 0, 0, 1)
            kept = holder.keep(self.service, variables, self.lifeline[0])
            self._tasks.append(asyncio.create_task(kept))

    def _stuck(self, stuck: Stuck) -> None:
        holder.end(self.service, stuck.place, "it is silent")

    def stop(self) -> None:
        """End the service as SIGKILL does: open calls break."""

        async def end() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
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
        return self.run(self.service.shared.status)

    def validate(self) -> None:
        self.run(self.service.shared.validate)

    @property
    def keeper(self) -> int:
        """Pid of the process that keeps weights; 0 if there is none now."""
        known = self.status.roles.get(HOLDER)
        return known.members[0].pid if known and known.members[0].state == "live" else 0

    # ---- processes

    def variables(self, role: str, index: int, attempt: int, instances: int) -> dict[str, str]:
        found = environment.variables(
            f"127.0.0.1:{self.port}", self.directory.token, role, attempt, job="test", tls=self.tls
        )
        return {**found, "ROLE_RANK": str(index), "ROLE_WORLD_SIZE": str(instances)}

    def launch(
        self, role: str, index: int, target: str, attempt: int = 1, instances: int = 1, *args: str
    ) -> subprocess.Popen[str]:
        """Start an instance: ``module:Class`` or a script."""
        self._launched[role, index] = attempt, target, instances, args
        self.run(lambda: self.service.tell(MemberStarted(MemberPlace(role, index, attempt))))
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

    def write(self, name: str, text: str) -> None:
        (self.directory.path / name).write_text(text)

    def attempt(self, role: str, index: int) -> int:
        return self._launched[role, index][0]

    def again(self, role: str, index: int) -> None:
        """Start the next attempt of an instance."""
        attempt, target, instances, args = self._launched[role, index]
        self.launch(role, index, target, attempt + 1, instances, *args)

    def dead(self, role: str) -> list[int]:
        """Return the indices of processes that have ended."""
        items = self.processes.items()
        return [
            index for (name, index), process in items if name == role and process.poll() is not None
        ]

    def kill(self, role: str, index: int) -> None:
        """Kill an instance."""
        self.processes[role, index].send_signal(signal.SIGKILL)
        self.lost(role, index)

    def lost(self, role: str, index: int) -> None:
        """Tell the service that an instance was killed."""
        self.processes.pop((role, index)).communicate()
        attempt = self.attempt(role, index)
        ended = MemberEnded(MemberPlace(role, index, attempt), "it was killed by SIGKILL")
        self.run(lambda: self.service.tell(ended))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()
        self.validate()
        self.stop()
        for fd in self.lifeline:
            if fd >= 0:
                os.close(fd)


@contextmanager
def coordinator(path: Path, *, keeps: bool = False, secured: bool = True) -> Iterator[Coordinator]:
    """A coordinator, with TLS if it is ``secured``; one that ``keeps`` has a process that keeps weights."""
    lifeline = os.pipe() if keeps else (-1, -1)
    if keeps:
        os.set_inheritable(lifeline[0], True)
    made = Coordinator(JobDir(path / "job"), lifeline=lifeline, secured=secured)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def joined(
    job: Coordinator, role: str, index: int = 0, attempt: int = 1, instances: int = 1
) -> Iterator[RoleWorker]:
    """This process as an instance of a role."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in job.variables(role, index, attempt, instances).items():
            patch.setenv(name, value)
        try:
            yield worker.current_worker()
        finally:
            worker.leave()
