"""Calls of this process that are under way: each goes to a member that can take it, and again if it may."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from dlrover.errors import ConfigurationError, MemberLostError
from dlrover.roles.messages import ENDED, HOLDER, LIVE, STARTING, JobView, MemberPlace, MemberView
from dlrover.roles.runtime import wire
from dlrover.roles.runtime.connections import (
    CallFailed,
    CallLost,
    CallOutcome,
    CallReturned,
    EncodedCall,
    MemberConnection,
)
from dlrover.roles.runtime.link import WARN_AFTER, ServiceLink, check_process
from dlrover.spec.words import counted

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Members that an idempotent call may lose; it has probably killed them."""
REASON_WAIT = 5.0
"""Seconds that a lost call waits for the coordinator to say why the member has died."""
UNREACHABLE = 0.5
"""Seconds after which a member that could not be reached is tried again."""


@dataclass(eq=False)
class RoleCall:
    """A call of a method of a role."""

    role: str
    index: int
    """Number of the member; -1: any that serves and has no other such call."""
    call: EncodedCall
    wait: float
    """Seconds to wait for a member."""
    of_all: bool = False
    """Whether it is one of the calls of all members: it needs none that the role has no longer."""
    future: Future[Any] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)
    """When it began to wait for a member."""
    warned: bool = False
    """Whether it was said that it waits."""
    idempotent: bool = False
    """Whether the member that it was sent to may run it twice."""
    deaths: int = 0
    lost: MemberPlace | None = None
    """The member that was lost, while it is not yet known why."""
    why: str = ""


class Calls:
    """All calls of this process. Any thread may use it.

    Args:
        link: Link to the job.
        machine: Id of this machine.
    """

    def __init__(self, link: ServiceLink, machine: str) -> None:
        self._link, self._machine = link, machine
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, int], deque[RoleCall]] = {}
        """Calls without a member, by role and index."""
        self._mourned: list[RoleCall] = []
        self._connections: dict[tuple[str, int], MemberConnection] = {}
        self._busy: dict[MemberPlace, int] = {}
        """Calls for any member that each member has."""
        self._unreachable: dict[MemberPlace, float] = {}
        self._turn = 0
        self._due = 0.0
        """When the next look at the calls that wait is due."""
        self._wake = threading.Event()
        self._closed = False
        link.listeners.append(lambda _view: self._wake.set())
        self._thread = threading.Thread(target=self._run, name="roles-dispatch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Lose all calls."""
        self._closed = True
        self._wake.set()
        self._thread.join(5)
        for connection in list(self._connections.values()):
            connection.close()

    def submit(self, *calls: RoleCall) -> None:
        """Have calls sent, or wait for members.

        Raises:
            ConfigurationError: This is a fork of the process that joined.
        """
        check_process(self._link.pid)
        with self._lock:
            for call in calls:
                self._waiting.setdefault((call.role, call.index), deque()).append(call)
        self._wake.set()  # what follows must not be interrupted, as the caller's thread may be

    def _look_by(self, due: float) -> None:
        """Look then at the calls that wait, unless a look is due before."""
        now = time.monotonic()
        if not now < self._due <= due:
            self._due = due
            self._wake_later(due - now)

    def _wake_later(self, seconds: float) -> None:
        self._link.later(seconds + 0.01, self._wake.set)

    # ---- the thread that follows the job

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait()
            self._wake.clear()
            self._drop_lost(self._link.view)
            self._pump()
            self._look_at_waiting()
            self._mourn()

    def _drop_lost(self, view: JobView) -> None:
        """End the connections to lives that are over, even if their processes still hold them open."""
        over = []
        with self._lock:
            for key, connection in list(self._connections.items()):
                found = view.member(*key)
                if found is None or found.place != connection.place or found.state == ENDED:
                    over.append(self._connections.pop(key))
        for connection in over:
            connection.close()

    def _look_at_waiting(self) -> None:
        """Fail the calls that wait for too long; say once what the first for each member waits for."""
        now, view = time.monotonic(), self._link.view
        with self._lock:
            for (role, index), calls in self._waiting.items():
                if index < 0 and self._reachable(role, view, now):
                    for call in calls:
                        call.since = now  # it waits for its turn only
            waiting = [call for calls in self._waiting.values() for call in calls]
            gone = [call for call in waiting if _is_gone(call, view)]
            late = [c for c in waiting if now - c.since >= c.wait and c not in gone]
            for call in (*gone, *late):
                self._waiting[call.role, call.index].remove(call)
            first = [calls[0] for calls in self._waiting.values() if calls]
            unsaid = [call for call in first if not call.warned]
            long = [call for call in unsaid if now - call.since >= WARN_AFTER]
            for call in long:
                call.warned = True
            due = [call.since + call.wait for calls in self._waiting.values() for call in calls]
            due += [call.since + WARN_AFTER for call in unsaid if not call.warned]
        for call in gone:
            now_has = counted(view.roles[call.role].instances, "member")
            words = f"{call.role} {call.index} has left: the role has {now_has} now, and {call.call.method} waits no more."
            _fail(call, MemberLostError(words))
        for call in late:
            waited = f"waited {call.wait:.0f} s"
            _fail(call, MemberLostError(self._explain(call, waited)))
        for call in long:
            logger.warning("%s At most %.0f s.", self._explain(call, "waits"), call.wait)
        if due:
            self._look_by(min(due))

    def _explain(self, call: RoleCall, waits: str) -> str:
        view = self._link.view
        who = (
            f"{call.role} {call.index}"
            if call.index >= 0
            else f"a member of {call.role} that serves"
        )
        members = view.role(call.role).members
        known = ", ".join(f"{one.place} {_state(one)}" for one in members)
        if call.index < 0 and any(one.state == LIVE and not one.serving for one in members):
            known += "; no part of a batch goes to one that has not loaded them by itself"
        if not members:
            known = f"the job's roles are {', '.join(sorted(name for name in view.roles if name != HOLDER))}"
        return f"{call.call.method} {waits} for {who}: {known}."

    def _mourn(self) -> None:
        """Fail calls whose members were lost, once the coordinator has said why, or after a while."""
        now, view = time.monotonic(), self._link.view
        done = []
        with self._lock:
            for call in list(self._mourned):
                assert call.lost is not None
                found = view.member(call.lost.role, call.lost.index)
                over = found is not None and (found.place != call.lost or found.state == ENDED)
                if over and found is not None and found.reason:
                    call.why = found.reason
                elif now - call.since < REASON_WAIT:
                    continue
                self._mourned.remove(call)
                done.append(call)
        for call in done:
            _fail(call, MemberLostError(_lost(call)))

    # ---- sending

    def _pump(self) -> None:
        """Send every waiting call for which there is a member."""
        while True:
            with self._lock:
                placed = self._next(self._link.view)
            if placed is None:
                return
            call, connection, counts = placed
            if isinstance(connection, ConfigurationError):
                _fail(call, connection)
                continue
            connection.call(call.call, self._callback(call, connection.place, counts=counts))

    def _next(
        self, view: JobView
    ) -> tuple[RoleCall, MemberConnection | ConfigurationError, bool] | None:
        """Take a waiting call that has a member, or one with an error; the lock is held."""
        for key, calls in list(self._waiting.items()):
            while calls and (found := self._choose(*key, view)) is not None:
                call = calls.popleft()
                if call.future.cancelled():
                    continue
                if call.call.method not in found.methods:
                    known = ", ".join(sorted(found.methods))
                    error = f"{call.role} has no method {call.call.method}; it has {known}."
                    return call, ConfigurationError(error), False
                call.idempotent = found.methods[call.call.method]
                if call.index < 0:
                    self._busy[found.place] = self._busy.get(found.place, 0) + 1
                return call, self._connection(found), call.index < 0
            if not calls:
                del self._waiting[key]
        return None

    def _choose(self, role: str, index: int, view: JobView) -> MemberView | None:
        now = time.monotonic()
        if index >= 0:
            found = view.member(role, index)
            usable = found is not None and found.state == LIVE and bool(found.methods)
            if found is None or not usable or self._unreachable.get(found.place, 0.0) > now:
                return None
            return found
        members = [one for one in self._reachable(role, view, now) if not self._busy.get(one.place)]
        if not members:
            return None
        self._turn += 1
        return members[self._turn % len(members)]

    def _reachable(self, role: str, view: JobView, now: float) -> list[MemberView]:
        """Return the members that serve; those that have calls are among them."""
        return [
            one
            for one in view.role(role).members
            if one.serving and one.methods and self._unreachable.get(one.place, 0.0) <= now
        ]

    def _connection(self, found: MemberView) -> MemberConnection:
        key = (found.place.role, found.place.index)
        known = self._connections.get(key)
        if known is not None and known.place == found.place and not known.closed:
            return known
        address, machine, secret = found.address, self._machine, self._link.secret
        tls = self._link.secured
        made = MemberConnection(found, lambda: wire.connect(address, machine, secret, tls=tls))
        self._connections[key] = made
        return made

    def _callback(
        self, call: RoleCall, place: MemberPlace, *, counts: bool
    ) -> Callable[[CallOutcome], None]:
        def done(outcome: CallOutcome) -> None:
            with self._lock:
                if counts:
                    self._busy[place] -= 1
                    if not self._busy[place]:
                        del self._busy[place]
            match outcome:
                case CallReturned(value):
                    _finish(call, value)
                case CallFailed(error):
                    _fail(call, error)
                case CallLost():
                    self._again(call, place, outcome)
            if counts:
                self._pump()

        return done

    def _again(self, call: RoleCall, place: MemberPlace, lost: CallLost) -> None:
        """Have a lost call wait for a member again, if it may run twice or has not run."""
        with self._lock:
            if lost.began:  # otherwise it still waits for a member
                call.since = time.monotonic()
            call.deaths += lost.began
            if lost.began and (not call.idempotent or call.deaths >= MAX_DEATHS):
                call.lost, call.why = place, lost.why
                self._mourned.append(call)
                delay = REASON_WAIT
            else:
                self._unreachable[place] = time.monotonic() + UNREACHABLE
                self._waiting.setdefault((call.role, call.index), deque()).appendleft(call)
                delay = call.wait
        self._wake_later(UNREACHABLE)
        self._wake_later(delay)
        self._wake.set()


def _is_gone(call: RoleCall, view: JobView) -> bool:
    """Return whether a call of all members waits for one that the role, which has shrunk, has no longer."""
    instances = view.role(call.role).instances
    return call.of_all and 0 < instances <= call.index


def _state(one: MemberView) -> str:
    if one.state == LIVE and not one.methods:
        return "exports no methods yet"  # it may have been started again
    if one.state == LIVE:
        return "serves" if one.serving else "has not the current weights"
    why = f": {one.reason}" if one.reason else ""
    return f"{'starts' if one.state == STARTING else 'has ended'}{why}"


def _lost(call: RoleCall) -> str:
    assert call.lost is not None
    text = f"{call.lost} was lost while it ran {call.call.method}: {call.why.rstrip('.')}."
    if call.deaths >= MAX_DEATHS:
        return f"{text} {call.deaths} members were lost in this call, so it is not made again."
    return f"{text} A method that may run twice, @rpc(idempotent=True), is called again."


def _finish(call: RoleCall, value: Any) -> None:
    if call.future.set_running_or_notify_cancel():
        call.future.set_result(value)


def _fail(call: RoleCall, error: Exception) -> None:
    if call.future.set_running_or_notify_cancel():
        call.future.set_exception(error)
