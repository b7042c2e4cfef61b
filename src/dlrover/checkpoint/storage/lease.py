"""The lease on a checkpoint directory: only its holder may store and delete steps there.

::

    <directory>/lease         the world that stores its steps here, a `Holder`
    <directory>/lease.beat    changes while the saver of its rank 0 lives, a `Beat`
    <directory>/lease.worlds  the worlds' numbers, in the order in which they began, `Worlds`

The saver of rank 0 takes the lease before a world stores its first step, and checks it before it
publishes or deletes anything. A newer world of the same job takes the lease at once, and so does any
training whose predecessor has released it or is dead. A training of another job is refused while the holder
lives. Clocks of different machines are not compared: changes of the beat show that the holder lives.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from dlrover._util import clocks, decoding, procs
from dlrover.checkpoint.storage import formats
from dlrover.checkpoint.storage.formats import OtherFormatError
from dlrover.checkpoint.storage.stores import Store
from dlrover.errors import ConfigurationError, InfrastructureError

logger = logging.getLogger(__name__)

BEAT = 5.0
"""Seconds between two beats of a living holder."""
LOOK = 1.5 * BEAT
"""Seconds without a beat after which a starting training assumes that the holder has ended."""
WATCH = 20.0
"""Seconds without a beat after which the holder of another job counts as dead."""
FORMER = 64
"""Number of former holders that are remembered."""
_LEASE, _BEAT, _WORLDS = "lease", "lease.beat", "lease.worlds"
_IDENTIFIERS = ("TORCHELASTIC_RUN_ID", "DLROVER_KUBERNETES_JOB", "DLROVER_JOB_DIR")
"""Environment variables that identify a job; torchrun's is ``none`` if the user sets none."""


class ProcessId(msgspec.Struct, frozen=True):
    """Identity of a process, by which others on its machine can see whether it runs."""

    namespace: str
    """The machine's boot id and the pid namespace."""
    pid: int
    started: int

    @property
    def is_dead(self) -> bool:
        """True if the process is known to have ended, which only its own machine can see."""
        return self.namespace == _namespace() and not procs.runs(self.pid, self.started)


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the lease."""

    number: int
    """The world's number, greater for a world that began later."""
    session: int
    job: str
    """The job's identifier; empty if it has none."""
    host: str
    process: ProcessId
    former: tuple[int, ...] = ()
    """Sessions that have lost the lease."""
    released: bool = False

    @property
    def who(self) -> str:
        """Description of the holder for messages."""
        return f"job {self.job or '(without an identifier)'}, process {self.process.pid} on {self.host}"


class Beat(msgspec.Struct, frozen=True):
    """The content of the beat file, which changes while the holder lives."""

    session: int
    count: int


class Worlds(msgspec.Struct, frozen=True):
    """The worlds that have begun."""

    last: int = 0
    """The greatest number of a world."""
    numbers: dict[int, int] = {}
    """By session: the numbers of the last `FORMER` worlds."""


class Lease:
    """The lease as seen by one process, which serves one world or several in turn.

    Args:
        store: the checkpoint directory.
        job: identifier of the job; empty if it has none.
    """

    def __init__(self, store: Store, job: str) -> None:
        self._store = store
        self.job = job
        self._lock = threading.Lock()
        self._joined: dict[int, int | None] = {}
        """By session, in order of joining: the number of its world; None if unknown."""
        self._living: int | None = None
        """The session whose rank 0 is connected; None if there is none."""
        self._beats = 0

    def join(self, session: int) -> None:
        """Note that a world begins whose rank 0 this process serves."""
        with self._lock:
            self._living = session
            if session in self._joined:
                return
            try:
                self._joined[session] = self._number(session)
            except (OSError, OtherFormatError) as error:
                only_read = getattr(error, "errno", 0) in (errno.EACCES, errno.EPERM, errno.EROFS)
                logger.log(
                    logging.INFO if only_read else logging.WARNING,
                    "The lease of %s cannot be used: %s", self._store.location, error,
                )  # fmt: skip
                self._joined[session] = None

    def _number(self, session: int) -> int:
        """Return the number of a world, the same in every process that asks."""
        worlds, holder = self._worlds(), self._read()
        if session in worlds.numbers:
            return worlds.numbers[session]
        number = max(worlds.last, holder.number if holder is not None else 0) + 1
        numbers = dict([*worlds.numbers.items(), (session, number)][-FORMER:])
        self._store.write(_WORLDS, formats.encode(Worlds(number, numbers)))
        return number

    def refuse_other(self, pause: Callable[[float], object]) -> None:
        """Refuse a directory in which another job is training, before anything is loaded from it.

        Watch a holder that may be dead for up to `LOOK` seconds, without taking the lease.

        Raises:
            ConfigurationError: another job is training there.
        """
        try:
            holder = self._read()
        except (OSError, OtherFormatError):
            return  # `join` logs it
        if holder is None or holder.released or holder.process.is_dead:
            return
        if not (self.job and holder.job) or self.job == holder.job:
            return
        first, until = self._beat(), time.monotonic() + LOOK
        logger.warning(
            "%s was left by %s; waiting up to %g s to see whether it still trains there",
            self._store.location, holder.who, LOOK,
        )  # fmt: skip
        while time.monotonic() < until:
            pause(BEAT / 10)
            if self._beat() != first:
                raise ConfigurationError(
                    f"{self._store.location} is in use by another training ({holder.who}). Give each training a"
                    " directory of its own, or read this one with Checkpointer(..., read_only=True)."
                )

    def leave(self, session: int) -> None:
        """Note that rank 0 of a world is gone."""
        with self._lock:
            if self._living == session:
                self._living = None

    def check(self, session: int, pause: Callable[[float], object]) -> None:
        """Ensure that a world may publish and delete; take the lease unless this process holds it.

        Args:
            session: the world's session.
            pause: waits some seconds; raises when the answer is no longer needed.

        Raises:
            OSError: the lease cannot be read or written.
            InfrastructureError: another training stores its steps here.
        """
        holder = self._read()
        if holder is None:
            self._take(session, None)
        elif not self._is_ours(session, holder):
            self._refuse_newer(session, holder)
            if not (holder.released or self._is_known(session, holder)):
                self._watch(holder, pause)
            self._take(session, holder)

    def _is_ours(self, session: int, holder: Holder) -> bool:
        """Return whether the session, or a later one of this process that lets it finish, holds the lease."""
        if holder.released:
            return False
        order = list(self._joined)
        later = order[order.index(session) :] if session in order else [session]
        return holder.session in later

    def _refuse_newer(self, session: int, holder: Holder) -> None:
        own = self._joined.get(session)
        newer = own is not None and holder.number > own
        if session in holder.former or (newer and holder.session not in self._joined):
            raise InfrastructureError(
                f"{self._store.location} belongs to another training, which has taken it since this one began"
                f" ({holder.who}). This one stores and deletes nothing there any more; give each training a"
                " directory of its own."
            )

    def _is_known(self, session: int, holder: Holder) -> bool:
        """Return whether the holder is an earlier world of this job or process, or is known to be dead."""
        is_later = self._joined.get(session) is not None  # else it was refused already
        same_job = bool(self.job) and holder.job == self.job
        return (is_later and same_job) or holder.session in self._joined or holder.process.is_dead

    def _watch(self, holder: Holder, pause: Callable[[float], object]) -> None:
        """Wait until a holder that may be newer or of another job counts as dead.

        Raises:
            InfrastructureError: the holder lives.
        """
        logger.warning(
            "%s was left by %s; waiting %g s to see whether it still stores steps there",
            self._store.location, holder.who, WATCH,
        )  # fmt: skip
        first, until = self._beat(), time.monotonic() + WATCH
        while time.monotonic() < until:
            pause(min(BEAT, WATCH) / 5)
            if self._beat() != first or self._read() != holder:
                raise InfrastructureError(
                    f"{self._store.location} is in use by another training ({holder.who}). This one"
                    " stores and deletes nothing there; give each training a directory of its own."
                )

    def _take(self, session: int, before: Holder | None) -> None:
        former = (*before.former, before.session)[-FORMER:] if before is not None else ()
        last = before.number if before is not None else 0
        own = self._joined.get(session)
        holder = Holder(
            number=last + 1 if own is None else max(last, own),
            session=session,
            job=self.job,
            host=socket.gethostname(),
            process=ProcessId(_namespace(), os.getpid(), procs.start_time(os.getpid())),
            former=tuple(other for other in former if other != session),
        )
        self._store.write(_LEASE, formats.encode(holder))
        with self._lock:
            self._joined.setdefault(session, None)
        logger.info("Steps are stored in %s from now on", self._store.location)

    # ---- life

    def beat(self) -> None:
        """Write a beat if this process holds the lease and rank 0 is connected."""
        if self._living is None:
            return
        holder = self._read()
        if holder is not None and holder.session == self._living and not holder.released:
            self._beats += 1
            data = msgspec.json.encode(Beat(holder.session, self._beats))
            self._store.write(_BEAT, data)

    def release(self) -> None:
        """Release the lease if this process holds it, so that any training can take it at once."""
        with contextlib.suppress(OSError, OtherFormatError):  # it will count as dead
            holder = self._read()
            if holder is not None and holder.session in self._joined:
                released = msgspec.structs.replace(holder, released=True)
                self._store.write(_LEASE, formats.encode(released))
                self._store.delete(_BEAT)

    # ---- files

    def _read(self) -> Holder | None:
        """Return the holder; None if there was never one, or the file is damaged.

        Raises:
            OtherFormatError: another version of DLRover has written it.
        """
        try:
            return formats.decode(self._store.read(_LEASE), Holder, self._store.where(_LEASE))
        except (FileNotFoundError, msgspec.DecodeError):
            return None

    def _worlds(self) -> Worlds:
        try:
            return formats.decode(self._store.read(_WORLDS), Worlds, self._store.where(_WORLDS))
        except (FileNotFoundError, msgspec.DecodeError):
            return Worlds()

    def _beat(self) -> Beat | None:
        try:
            return decoding.json(self._store.read(_BEAT), Beat)
        except (FileNotFoundError, msgspec.DecodeError):
            return None


def _namespace() -> str:
    return f"{clocks.boot_id()} {os.readlink('/proc/self/ns/pid')}"


def job_of(env: Mapping[str, str]) -> str:
    """Return the job identifier that the launcher gives to workers; empty if there is none."""
    given = [env.get(name, "") for name in _IDENTIFIERS]
    return next((text for text in given if text not in ("", "none")), "")
