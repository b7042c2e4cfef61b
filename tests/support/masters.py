"""Real master processes that tests can kill and restart."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import final

import msgspec

from dlrover._util import files
from dlrover.errors import InfrastructureError
from dlrover.rpc.client import MasterClient
from dlrover.spec.job import JobSpec
from dlrover.spec.jobdir import JobDir, MasterAddress, MasterConfig, TlsFiles

START_TIMEOUT = 30.0
"""Seconds that a master process has until it listens."""
START_POLL = 0.005
"""Seconds between two checks for a listening master."""


@final
class MasterProcess:
    """The master of ``job`` in the directory ``path``, as an async context manager.

    Leaving the context kills the process; so does the death of the process that made it.
    """

    def __init__(
        self,
        path: Path,
        job: JobSpec,
        *,
        token: str = "simulated",
        tls: TlsFiles | None = None,
        journal: str = "file:",
    ) -> None:
        self.job_dir = JobDir(path)
        self.token = token
        self.tls = tls or TlsFiles()
        self.process: subprocess.Popen[bytes] | None = None
        self._lifeline = os.pipe()  # the master exits when its writing end closes
        config = MasterConfig(job=job, tls=self.tls, journal=journal)
        files.write_atomically(self.job_dir.token, token.encode(), mode=0o600)
        files.write_atomically(self.job_dir.job, msgspec.json.encode(config))

    async def __aenter__(self) -> MasterProcess:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.kill()
        for fd in self._lifeline:
            os.close(fd)

    @property
    def pid(self) -> int:
        """Process id of the master that was started last."""
        assert self.process is not None
        return self.process.pid

    @property
    def address(self) -> str:
        """Address on which the master listens; the same after each start."""
        found = msgspec.json.decode(self.job_dir.master.read_bytes(), type=MasterAddress)
        return found.address

    def client(self) -> MasterClient:
        """Return a new connection to the master."""
        return MasterClient(self.address, self.token, TlsFiles(ca=self.tls.ca))

    async def start(self) -> None:
        """Start a master process, the first one or a successor, and wait until it listens.

        Raises:
            InfrastructureError: the process ends, or does not listen within `START_TIMEOUT`.
        """
        self.process = process = self._spawn()
        until = time.monotonic() + START_TIMEOUT
        while not self._listens():
            code = process.poll()
            if code is not None or time.monotonic() > until:
                ended = "is still starting" if code is None else f"ended with exit code {code}"
                raise InfrastructureError(
                    f"The master of {self.job_dir.path} does not listen: it {ended}; "
                    f"see {self.job_dir.master_log}."
                )
            await asyncio.sleep(START_POLL)

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dlrover.master", "--job-dir", str(self.job_dir.path)]
        command += ["--lifeline-fd", str(self._lifeline[0])]
        return subprocess.Popen(command, pass_fds=self._lifeline[:1])

    def _listens(self) -> bool:
        if not self.job_dir.master.exists():
            return False
        found = msgspec.json.decode(self.job_dir.master.read_bytes(), type=MasterAddress)
        return found.pid == self.pid

    def signal(self, number: signal.Signals) -> None:
        """Send the master a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """End the master with SIGKILL, and wait until it has ended."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
