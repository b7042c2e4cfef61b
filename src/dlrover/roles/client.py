"""The client of a coordinator, for the commands of ``dlrover``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec

from dlrover._util import decoding
from dlrover.errors import kind_of
from dlrover.roles.coordinator.status import RolesStatus
from dlrover.roles.coordinator.streaming import Events, EventsRequest
from dlrover.roles.spec import RolesConfig
from dlrover.rpc.connection import Connection
from dlrover.rpc.messages import Done, StatusRequest, StopRequest
from dlrover.spec.events import Event
from dlrover.spec.jobdir import JobDir, MasterAddress


class RolesClient(Connection):
    """A connection to the coordinator of a job of several roles."""

    peer = "The coordinator at"

    async def status(self) -> RolesStatus:
        """Return the status of the job."""
        found: RolesStatus = await self._call("Status", StatusRequest(), RolesStatus)
        return found

    async def events(self, since: int) -> AsyncIterator[tuple[Event, ...]]:
        """Yield the events after number ``since``, and those to come, until the coordinator leaves; first none."""
        found = self._follow("RoleEvents", EventsRequest(since), Events)
        async with contextlib.aclosing(found) as batches:
            async for batch in batches:
                yield batch.events

    async def stop(self, reason: str, exit_code: int) -> None:
        """Ask the coordinator to end the job with ``exit_code``."""
        await self._call("Stop", StopRequest(reason, exit_code), Done)


def connect(job_dir: JobDir) -> RolesClient:
    """Return a client of the coordinator of the job in a directory.

    Raises:
        ConfigurationError: the directory does not contain its address.
    """
    try:
        address = decoding.json(job_dir.master.read_bytes(), MasterAddress).address
        token = job_dir.token.read_text().strip()
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise kind_of(error)(
            f"{job_dir.path} holds no address of its job's coordinator: {error}."
        ) from error
    return RolesClient(address, token, load_config(job_dir).tls)


def load_config(job_dir: JobDir) -> RolesConfig:
    """Return the configuration in the directory of a job of several roles.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        return decoding.json(job_dir.roles.read_bytes(), RolesConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise kind_of(error)(f"{job_dir.roles} cannot be read: {error}.") from error
