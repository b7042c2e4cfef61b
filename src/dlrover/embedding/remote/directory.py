"""The placement as this process knows it, and the master's answer to questions about it."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Protocol

from dlrover._util import backoff, forks
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.rpc.relayed import RelayedMaster
from dlrover.spec.requests import Unanswered
from dlrover.spec.requests.placement import (
    LoadTables,
    LookPlacement,
    PlacementReply,
    PlacementRequest,
)

logger = logging.getLogger(__name__)

RETRY = 0.05, 1.0
"""Seconds until the first retry after the master could not be reached, and between later ones."""
WARN_AFTER = 10.0
"""Seconds without a master after which a warning is logged."""

JOURNAL_LOST = (
    "The master has lost its journal, and with it where the rows of the embedding tables are: they are lost. The program"
    " starts again, and loads a checkpoint."
)


class JobEndedError(ConfigurationError):
    """The job has ended: its tables are asked for no more."""


def half_loaded(loading: LoadTables) -> str:
    """Return why tables cannot be used whose load is not over."""
    return (
        f"The embedding tables are half loaded, since the load of step {loading.step} was interrupted or has failed;"
        " load a checkpoint before they are used."
    )


class Directory(Protocol):
    """Source of the placement. Calls may come from several threads."""

    def ask(self, request: PlacementRequest) -> PlacementReply:
        """Return the reply to a request.

        Raises:
            ConfigurationError: The request was refused.
        """

    def look(self, known: int) -> PlacementReply:
        """Return the placement; without servers if it is still version ``known``."""


class JobDirectory:
    """Directory of the job that this process belongs to. It waits while the master is away.

    Args:
        address: Address of the agent's relay.
        timeout: Seconds to wait at most.
    """

    def __init__(self, address: str, timeout: float = math.inf) -> None:
        self._relay, self._timeout = RelayedMaster(address), timeout
        self._lock = forks.Lock()
        self._closed = threading.Event()

    def ask(self, request: PlacementRequest) -> PlacementReply:
        """Return the reply to a request."""
        with self._lock:
            began = time.monotonic()
            warn_at = began + WARN_AFTER
            for delay in backoff.delays(*RETRY):
                reply = self._relay.ask(request)
                if isinstance(reply, PlacementReply):
                    return reply
                if not isinstance(reply, Unanswered):
                    raise InfrastructureError(
                        "The master's answer is not one about embedding tables."
                    )
                if reply.ended:
                    raise JobEndedError(reply.refused)
                if reply.refused:
                    raise ConfigurationError(reply.refused)
                if time.monotonic() - began > self._timeout:
                    raise InfrastructureError(reply.away)
                if time.monotonic() > warn_at:
                    warn_at = float("inf")
                    logger.warning("Waiting for the placement of embedding tables: %s", reply.away)
                self._closed.wait(delay)
                if self._closed.is_set():
                    break
            raise InfrastructureError("The directory of the embedding servers is closed.")

    def close(self) -> None:
        """Give up waiting, and close the connection."""
        self._closed.set()
        with self._lock:
            self._relay.close()

    def look(self, known: int) -> PlacementReply:
        """Return the placement; without servers if it is still version ``known``."""
        return self.ask(LookPlacement(known))
