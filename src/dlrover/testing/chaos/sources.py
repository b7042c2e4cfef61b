"""Sources on a job's progress: its events and the master's status."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.rpc import wire
from dlrover.rpc.client import MasterClient
from dlrover.rpc.messages import Status
from dlrover.spec.events import Event
from dlrover.spec.jobdir import JobDir, MasterAddress, MasterConfig, decode

STATUS_TIMEOUT = 2.0
"""Seconds that the master has to answer."""


class EventLog:
    """Events of a job, read from its file as they are written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.events: list[Event] = []

    def refresh(self) -> list[Event]:
        """Return all events so far; leave a half-written line for the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return self.events
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.events += [msgspec.json.decode(line, type=Event) for line in whole.splitlines()]
        return self.events


async def ask_status(job_dir: JobDir) -> Status | None:
    """Return the job's status; None if its master does not answer."""
    try:
        async with _connect(job_dir) as client:
            return await client.status()
    except _NO_ANSWER:
        return None


async def ask_to_stop(job_dir: JobDir, reason: str, exit_code: int) -> bool:
    """Ask the master to end the job; return True if it got the request."""
    try:
        async with _connect(job_dir) as client:
            await client.stop(reason, exit_code)
    except _NO_ANSWER:
        return False
    return True


_NO_ANSWER = (OSError, msgspec.DecodeError, InfrastructureError, ConfigurationError)


def _connect(job_dir: JobDir) -> MasterClient:
    address = msgspec.json.decode(job_dir.master.read_bytes(), type=MasterAddress).address
    tls = decode(job_dir.job, job_dir.job.read_bytes(), MasterConfig).tls
    return MasterClient(
        address,
        job_dir.token.read_text().strip(),
        wire.Tls(tls.cert, tls.key, tls.ca, tls.server_name),
        timeout=STATUS_TIMEOUT,
    )
