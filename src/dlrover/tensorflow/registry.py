"""The job's list of tasks, as a process of the job reads and changes it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Collection, Iterator
from typing import Protocol

from dlrover import launched
from dlrover._util import backoff
from dlrover.errors import InfrastructureError
from dlrover.rpc.relayed import RelayedMaster
from dlrover.spec.requests import Unanswered
from dlrover.spec.requests.cluster import (
    ClusterReply,
    ClusterRequest,
    ClusterTask,
    LookCluster,
)

RETRY = 0.05, 1.0
"""Seconds until the first retry after the master could not be reached, and between later ones."""
PROBE_TIMEOUT = 1.0
"""Seconds in which a task must accept a connection; a dead process of a living machine refuses it at once."""


class Registry(Protocol):
    """The job's list of tasks. One thread uses it at a time."""

    def ask(self, request: ClusterRequest, wait: float = 0.0) -> ClusterReply:
        """Send a request; repeat it for ``wait`` seconds while no master can be reached.

        Raises:
            InfrastructureError: the request was refused, or no master was reached.
        """

    def another(self) -> Registry:
        """Return one for another thread."""


class JobRegistry:
    """Registry that the job's master keeps."""

    def __init__(self) -> None:
        self._relay = RelayedMaster(launched.given.relay)

    def ask(self, request: ClusterRequest, wait: float = 0.0) -> ClusterReply:
        """Send a request to the master, by way of the agent."""
        until, delays = time.monotonic() + wait, backoff.delays(*RETRY)
        while True:
            reply = self._relay.ask(request)
            if isinstance(reply, ClusterReply):
                return reply
            away = isinstance(reply, Unanswered) and reply.away
            if not away or time.monotonic() > until:
                why = (reply.away or reply.refused) if isinstance(reply, Unanswered) else "no reply"
                raise InfrastructureError(f"The job's master does not list the tasks: {why}")
            threading.Event().wait(next(delays))

    def another(self) -> JobRegistry:
        """Return a registry with a connection of its own."""
        return JobRegistry()


class FixedRegistry:
    """Registry of tasks that never change, for a program that runs alone."""

    def __init__(self, tasks: Collection[ClusterTask]) -> None:
        roles = [task.role for task in tasks]
        wanted = {role: roles.count(role) for role in roles}
        self._reply = ClusterReply(tasks=tuple(tasks), wanted=wanted)

    def ask(self, request: ClusterRequest, wait: float = 0.0) -> ClusterReply:
        """Return the tasks."""
        return self._reply

    def another(self) -> FixedRegistry:
        """Return this registry."""
        return self


def look(registry: Registry, every: float, timeout: float) -> Iterator[ClusterReply]:
    """Yield the job's tasks every ``every`` seconds, for ``timeout`` seconds."""
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        yield registry.ask(LookCluster(), until - time.monotonic())
        threading.Event().wait(every)


def answers(task: ClusterTask) -> bool:
    """Return whether a task accepts connections."""
    host, _, port = task.address.rpartition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), PROBE_TIMEOUT).close()
        return True
    return False


def free_port(preferred: int = 0) -> int:
    """Return a free port of this machine: the preferred one if it is free."""
    with socket.socket() as probe:
        # Connections of the last start may still linger on it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", preferred))
        except OSError:
            return free_port()
        return int(probe.getsockname()[1])


def joined(host: str, port: int) -> str:
    """Return an address of a host and a port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
