"""Connections of this process to those that keep weights."""

from __future__ import annotations

import itertools
import secrets
import threading

from dlrover.roles.messages import CallAddress, MemberPlace
from dlrover.roles.runtime.memory import HolderConnection
from dlrover.roles.runtime.worker import RoleWorker


class Holders:
    """Connections of this process to those that keep weights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[MemberPlace, HolderConnection] = {}
        self._worker: RoleWorker | None = None
        self._declared: set[str] = set()
        self.publishing = threading.Lock()
        self.numbers = itertools.count()
        self.id = secrets.token_hex(6)

    def connection(
        self, worker: RoleWorker, place: MemberPlace, address: CallAddress
    ) -> HolderConnection:
        """Return the connection to a process.

        Raises:
            OSError: It is gone.
        """
        with self._lock:
            self._follow(worker)
            known = self._open.get(place)
            if known is None or known.closed:
                link = worker.link
                known = HolderConnection(address, worker.machine, link.secret, tls=link.secured)
                self._open[place] = known
            return known

    def declared(self, worker: RoleWorker) -> set[str]:
        """Return the names of the weights that this process has said that it works with."""
        with self._lock:
            self._follow(worker)
            return self._declared

    def _follow(self, worker: RoleWorker) -> None:
        if self._worker is not worker:  # it has left the job and joined again
            self._open, self._declared, self._worker = {}, set(), worker
            worker.closing.append(self._close)

    def _close(self) -> None:
        with self._lock:
            for connection in self._open.values():
                connection.close()

    def drop(self, place: MemberPlace) -> None:
        """Connect anew next time."""
        with self._lock:
            known = self._open.pop(place, None)
        if known is not None:
            known.close()


holders = Holders()
