"""This process as a member of its role."""

from __future__ import annotations

import functools
import json
import operator
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrover import config, launched
from dlrover._util import clocks
from dlrover._util.sockets import address_towards
from dlrover.checkpoint.saver import certificates
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.roles.messages import (
    MAX_CURSOR,
    START,
    WORK,
    CursorIs,
    JoinRole,
    LookCursor,
    MemberPlace,
    Resumed,
    SetCursor,
)
from dlrover.roles.runtime import environment, payload
from dlrover.roles.runtime.calls import Calls
from dlrover.roles.runtime.exporting import exports
from dlrover.roles.runtime.holding import HeldParts
from dlrover.roles.runtime.link import ServiceLink, expected
from dlrover.roles.runtime.listener import CallListener
from dlrover.roles.runtime.phases import Phases
from dlrover.roles.spec import NAME
from dlrover.spec.jobdir import TlsFiles


class RoleWorker:
    """This process: its place in the job, and its link to the others. `current_worker` returns it.

    Attributes:
        job: Name of the job.
        role: Name of the role.
        index: Number of this instance in its role, from 0; in an elastic role, that of the worker.
        attempt: Number of the start of the role's job, from 1.
        instances: Number of instances of the role.
        config: The user's configuration of the role.
        members: Maximum number of members of each role of the job; empty: not known.
    """

    def __init__(self, found: config.RolePlace, *, ready: bool = True) -> None:
        self.job, self.role = found.job, found.role
        self.index, self.instances, self.attempt = found.index, found.instances, found.attempt
        self.config: Any = _settings("config", found.config)
        self.members: dict[str, int] = _settings("roles", found.roles)
        self.pid = os.getpid()
        self.place: MemberPlace = environment.place(found)
        self.phases = Phases()
        self.phases.set(WORK if ready else START)
        pem = certificates.make() if found.tls_ca else ""
        tls = TlsFiles(ca=found.tls_ca, server_name=found.tls_server_name)
        self.link = ServiceLink(
            self.place, self.phases, found.address, *environment.credentials(found), tls
        )
        self.machine = machine()
        self.holding = HeldParts(self.place)
        self.link.listeners.append(self.holding.follow)
        self.closing: list[Callable[[], None]] = []
        """Called when this process leaves the job."""
        self._ready, self._resumes = ready, 0
        self._lock = threading.Lock()
        host = _own_address(found.address)
        self.listener = CallListener(
            exports, host, self.machine, self.link.secret, self.holding, self.phases, pem
        )
        self._join()
        exports.changed = self._join
        self.calls = Calls(self.link, self.machine)
        self._loaded, launched.loaded = launched.loaded, self._has_loaded

    def __repr__(self) -> str:
        return f"Worker(job={self.job!r}, role={self.role!r}, index={self.index}, attempt={self.attempt})"

    def _join(self) -> None:
        self.link.join(
            JoinRole(
                self.place,
                self.listener.address,
                exports.table(),
                os.getpid(),
                self.instances,
                self._ready,
            )
        )

    def serve(self, served: object) -> None:
        """Let other roles call the methods of an object: those with `rpc`, or all public ones if none has it."""
        if not self._ready:
            self.phases.leave()  # from now on, calls alone are its work
        self._ready = True
        exports.add_object(served)

    def ready(self) -> None:
        """Say that all is exported: others call this process from now on."""
        self._ready = True
        self._join()

    def close(self) -> None:
        """Leave the job: this process makes no more calls, and takes none."""
        exports.changed = None
        launched.loaded = self._loaded
        for close in self.closing:
            close()
        self.calls.close()
        self.listener.close()
        self.link.close()

    # ---- phases

    def phase(self, name: str) -> None:
        """Say in which phase this thread is: ``"work"``, ``"idle"``, or a name of your own with a limit in ``health``.

        Calls that are served are work, and waits for calls, queues and weights idle, without this.
        """
        if not NAME.fullmatch(name):
            raise ConfigurationError(
                f"phase {name!r}: must be a name of letters, digits, - and _, 63 at most."
            )
        self.phases.set(name)

    def progress(self, count: int = 1) -> None:
        """Note progress: the time that the phase may take begins anew.

        Calls that end, items put or acknowledged, versions published and the steps of a training count without this.
        """
        self.phases.progress(count)

    # ---- cursor and steps

    @property
    def cursor(self) -> Any:
        """What this instance has set last, in whatever life; None if it never has. It is in the job's journal."""
        cursor = expected(self.link.ask(LookCursor(self.place)), CursorIs).cursor
        return payload.decode(cursor, None) if cursor is not None else None

    @cursor.setter
    def cursor(self, value: Any) -> None:
        self.link.ask(SetCursor(self.place, encode_cursor(value)))

    def resumed(self, step: int) -> None:
        """Say that this process goes on from a step: what it published and learned after it never was.

        `dlrover.checkpoint` says so by itself when it loads a state. An elastic role goes back as a whole, once, and
        each of its processes may say so; an instance of any other role speaks for itself alone.

        Raises:
            ConfigurationError: The step is no whole number from 0.
        """
        step = step_number("step", step)
        with self._lock:
            self._resumes += 1
            count = self._resumes
        self.link.ask(Resumed(self.place, step, count))

    def _has_loaded(self, step: int) -> None:
        self._loaded(step)
        if self.pid == os.getpid():  # what a fork loads is not where this process goes on
            self.resumed(step)


def step_number(what: str, value: Any) -> int:
    """Return a step that a program gives: a whole number of Python, NumPy or PyTorch.

    Args:
        what: Name of the argument.
        value: What the program gives.

    Raises:
        ConfigurationError: It is no whole number from 0, or has more than 63 bits.
    """
    try:
        step = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        step = -1
    if not 0 <= step < 1 << 63:
        raise ConfigurationError(f"{what} {value!r:.100}: it must be a whole number, 0 or above.")
    return step


def encode_cursor(value: Any) -> bytes:
    """Return a cursor for the journal.

    Raises:
        ConfigurationError: It is too large, or of a type that cannot be kept.
    """
    data, buffers = payload.encode_named("the cursor", value)
    if buffers or len(data) > MAX_CURSOR:
        raise ConfigurationError(
            f"The cursor has {len(data)} bytes{' and arrays' if buffers else ''}; at most {MAX_CURSOR} bytes, without"
            " arrays, are accepted."
        )
    return data


_current: RoleWorker | None = None
_making = threading.Lock()


def current_worker() -> RoleWorker:
    """Return this process as a member of its role; the first call joins the job.

    Raises:
        ConfigurationError: The process belongs to no job of several roles, or its life in it is over.
        InfrastructureError: The coordinator cannot be reached.
    """
    return start(ready=True)


def start(*, ready: bool) -> RoleWorker:
    """Join the job if this process has not; without ``ready``, others do not call it yet."""
    global _current  # noqa: PLW0603 - one process, one place in the job
    with _making:
        if _current is None:
            _current = RoleWorker(environment.given(), ready=ready)
        elif _current.pid != os.getpid():
            raise ConfigurationError(
                "A fork of a process of a role takes no part in the job; only the process that joined does."
            )
        return _current


def leave() -> None:
    """Leave the job: the next `current_worker` joins anew."""
    global _current  # noqa: PLW0603
    with _making:
        if _current is not None:
            _current.close()
        _current = None


@functools.cache
def machine() -> str:
    """Return an id of this machine and its network namespace, within which Unix sockets are found."""
    return f"{clocks.boot_id()}-{Path('/proc/self/ns/net').stat().st_ino}"


def _own_address(coordinator: str) -> str:
    host, _, port = coordinator.rpartition(":")
    try:
        return address_towards(host.strip("[]"), int(port))
    except OSError as error:
        raise InfrastructureError(
            f"The coordinator's address {coordinator} has no route: {error}."
        ) from error


def _settings(field: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"{config.ROLE_VARIABLES[field]}: the value is no JSON: {error}."
        ) from error
