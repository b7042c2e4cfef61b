"""This process's link to the service of its job, which may be away for a while."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable
from typing import ClassVar, TypeVar

import msgspec

from dlrover._util import backoff, decoding, tasks
from dlrover.errors import ConfigurationError, DLRoverError, InfrastructureError, ProtocolError
from dlrover.roles.messages import (
    ENDED,
    MAX_WAIT,
    JobView,
    JoinRole,
    MemberPlace,
    Pulse,
    PulseReply,
    RoleReply,
    RoleRequest,
    Turned,
    WatchJob,
)
from dlrover.roles.runtime.phases import Phases, end
from dlrover.roles.runtime.wire import secret_of
from dlrover.rpc.connection import Connection
from dlrover.spec.jobdir import JobDir, MasterAddress, TlsFiles

logger = logging.getLogger(__name__)

AWAY_TIMEOUT = 600.0
"""Seconds that a request waits for a coordinator that is away."""
RETRY = 0.05, 1.0
"""Seconds until the first retry after the coordinator could not be reached, and between later ones."""
WARN_AFTER = 10.0
"""Seconds without a coordinator after which a warning is logged."""
Value = TypeVar("Value")
Reply = TypeVar("Reply", bound=RoleReply)


class CoordinatorClient(Connection):
    """A connection to the coordinator of a job of several roles."""

    peer: ClassVar[str] = "The coordinator at"

    async def ask(self, request: RoleRequest) -> RoleReply:
        """Send a request and return the reply."""
        wait = getattr(request, "wait", 0.0)
        reply: RoleReply = await self._call("RoleAsk", request, RoleReply, wait)
        return reply

    def watch(self, place: MemberPlace) -> AsyncGenerator[JobView, None]:
        """Yield the job whenever it changes."""
        return self._follow("RoleWatch", WatchJob(place), JobView)

    async def pulse(self, report: Pulse) -> PulseReply:
        """Report the phase."""
        reply: PulseReply = await self._call("RolePulse", report, PulseReply)
        return reply


class ServiceLink:
    """A link to the service; any thread may use it.

    Args:
        place: This life of the instance.
        phases: What it reports, and who is idle while a thread waits here.
        address: Address of the coordinator.
        token: Token of the job.
        beside: Directory where a coordinator that had to take another address writes it; None if it keeps its address.
        tls: How to verify the coordinator.
    """

    def __init__(
        self,
        place: MemberPlace,
        phases: Phases,
        address: str,
        token: str,
        beside: JobDir | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self.place, self.phases = place, phases
        self.view = JobView()
        self.pid = os.getpid()
        self.listeners: list[Callable[[JobView], None]] = []
        """Called on the link's thread with each view; they must not block."""
        self._address, self._token, self._beside = address, token, beside
        self.secret = secret_of(token)
        """Secret of the connections between processes of the job."""
        self._tls = tls or TlsFiles()
        self.over = threading.Event()
        """Set when this life of the instance is over: another has taken its place."""
        self._changed = threading.Condition()
        self._joined: JoinRole | None = None
        self._failed: DLRoverError | None = None
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._client: CoordinatorClient | None = None
        self._watching: asyncio.Task[None] | None = None
        self._reporting: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="roles-link", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    @property
    def secured(self) -> bool:
        """True if the job uses TLS."""
        return bool(self._tls.ca)

    def close(self) -> None:
        """End the link; requests that wait fail."""
        if self._closed or self._loop.is_closed():
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    async def _close(self) -> None:
        await tasks.stop(asyncio.all_tasks() - {asyncio.current_task()})
        if self._client is not None:
            await self._client.close()

    # ---- requests

    def ask(self, request: RoleRequest) -> RoleReply:
        """Return the reply to a request; wait while the coordinator is away.

        Raises:
            ConfigurationError: The service refuses the request.
            InfrastructureError: The coordinator was away for too long.
        """
        check_process(self.pid)
        with self.phases.waiting():
            asked = asyncio.run_coroutine_threadsafe(self._ask(request), self._loop)
            try:
                reply = asked.result()
            except BaseException:  # an interrupt: it must not take effect later on
                asked.cancel()
                raise
        if isinstance(reply, Turned):
            raise ConfigurationError(reply.why)
        return reply

    async def _ask(self, request: RoleRequest) -> RoleReply:
        away, warned = math.inf, False  # since when; what a request waits for may come late
        for delay in backoff.delays(*RETRY):
            try:
                return await self._connected().ask(request)
            except InfrastructureError as error:
                away = min(away, time.monotonic())
                waited = time.monotonic() - away
                if waited > AWAY_TIMEOUT:
                    raise InfrastructureError(
                        f"{error} Waited {waited:.0f} s of {AWAY_TIMEOUT:.0f} s."
                    ) from error
                if waited > WARN_AFTER and not warned:
                    warned = True
                    logger.warning("%s Waited %.0f s of %.0f s.", error, waited, AWAY_TIMEOUT)
            await asyncio.sleep(delay)
            await self._look_elsewhere()
        raise AssertionError

    def _connected(self) -> CoordinatorClient:
        if self._client is None:
            self._client = CoordinatorClient(self._address, self._token, self._tls)
        return self._client

    async def _look_elsewhere(self) -> None:
        """Connect to another address if a coordinator has taken one."""
        if self._beside is None:
            return
        with contextlib.suppress(OSError, msgspec.DecodeError):
            data = self._beside.master.read_bytes()
            address = decoding.json(data, MasterAddress).address
            if address != self._address:
                self._address, last, self._client = address, self._client, None
                if last is not None:
                    await last.close()

    # ---- membership and views

    def join(self, request: JoinRole) -> None:
        """Join the job, or change how this process has joined, and follow the job from then on.

        Raises:
            ConfigurationError: This life of the instance is over.
        """
        self.ask(request)
        self._joined = request
        if self._watching is None:
            self._loop.call_soon_threadsafe(self._begin)
            self.wait(lambda view: view.number > 0, MAX_WAIT, "the first view of the job")

    def _begin(self) -> None:
        self._watching = self._loop.create_task(self._watch())
        self._reporting = self._loop.create_task(self._report())

    async def _report(self) -> None:
        """Report the phase for as long as this life lasts; end the process if the answer says so."""
        while not self.over.is_set():
            pause = RETRY[1]
            try:
                reply = await self._connected().pulse(self.phases.pulse(self.place))
                pause = reply.pause
                if reply.end:
                    end(reply.end, self.phases)
            except DLRoverError as error:
                logger.debug("The phase cannot be reported now: %s", error)
            await asyncio.sleep(pause)

    async def _watch(self) -> None:
        delays = backoff.delays(*RETRY)
        while True:
            try:
                async with contextlib.aclosing(self._connected().watch(self.place)) as views:
                    async for view in views:
                        delays = backoff.delays(*RETRY)
                        await self._see(view)
            except InfrastructureError as error:
                logger.debug("The job cannot be followed now: %s", error)
            except DLRoverError as error:
                logger.exception("The job cannot be followed")
                self._fail(error)
                return
            await asyncio.sleep(next(delays))
            await self._look_elsewhere()

    async def _see(self, view: JobView) -> None:
        me = view.member(self.place.role, self.place.index)
        if me is not None and me.place.life > self.place.life:
            raise ConfigurationError(
                f"Attempt {self.place.attempt} of {self.place} is over: another has taken its place."
            )
        if me is not None and me.state == ENDED and self._joined is not None:
            logger.warning("The coordinator has lost sight of this process, which joins again")
            reply = await self._connected().ask(self._joined)
            if isinstance(reply, Turned):
                raise ConfigurationError(reply.why)
        with self._changed:
            self.view = view
            self._changed.notify_all()
        for listener in self.listeners:
            listener(view)

    def _fail(self, error: DLRoverError) -> None:
        self.over.set()
        with self._changed:
            self._failed = error
            self._changed.notify_all()

    def wait(
        self,
        found: Callable[[JobView], Value | None],
        timeout: float,
        what: str | Callable[[JobView], str],
    ) -> Value:
        """Return the first true value of ``found`` for a view of the job.

        Args:
            found: Looks at a view.
            timeout: Seconds.
            what: What is waited for, in words; they may depend on the view.

        Raises:
            InfrastructureError: None was true within ``timeout`` seconds.
            ConfigurationError: This life of the instance is over, or this is a fork of its process.
        """
        check_process(self.pid)
        until, warned = time.monotonic() + timeout, False
        with self.phases.waiting(), self._changed:
            while not (value := found(self.view)):
                if self._failed is not None:
                    raise self._failed
                left = until - time.monotonic()
                if left <= 0:
                    raise InfrastructureError(
                        f"Waited {timeout:.0f} s for {_in_words(what, self.view)}."
                    )
                if (
                    not self._changed.wait(min(left, WARN_AFTER))
                    and left > WARN_AFTER
                    and not warned
                ):
                    warned = True
                    words = _in_words(what, self.view)
                    logger.warning("Waiting for %s: at most %.0f s", words, timeout)
            return value

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Call ``what`` on the link's thread after a while, unless the link is closed by then; it must not block."""
        with contextlib.suppress(RuntimeError):  # asyncio's error for a closed loop
            self._loop.call_soon_threadsafe(self._loop.call_later, seconds, what)


def expected(reply: RoleReply, kind: type[Reply]) -> Reply:
    """Return a reply of the kind that its request gets.

    Raises:
        ProtocolError: It is of another kind.
    """
    if not isinstance(reply, kind):
        raise ProtocolError(f"The coordinator answered {type(reply).__name__}.")
    return reply


def check_process(pid: int) -> None:
    """Refuse a fork of the process that joined, ``pid``: it has the same connections, and none of the threads.

    Raises:
        ConfigurationError: This is a fork.
    """
    if pid != os.getpid():
        raise ConfigurationError(
            "A fork of a process of a role uses its queues, groups or weights; only the process that joined may."
        )


def _in_words(what: str | Callable[[JobView], str], view: JobView) -> str:
    return what if isinstance(what, str) else what(view)
