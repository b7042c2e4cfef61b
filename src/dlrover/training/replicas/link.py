"""A worker's link to the master's membership: pushed by its agent, asked for through the relay."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import msgspec

from dlrover import launched
from dlrover._util import decoding, framing
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.rpc.relayed import RelayedMaster, connected
from dlrover.spec.requests import Unanswered
from dlrover.spec.requests.membership import (
    Members,
    MembershipReply,
    MembershipRequest,
    MembersNow,
    Met,
)

RETRY = 0.05
"""Seconds between two attempts to reach the master, or the agent's socket."""
AWAY_LIMIT = 600.0
"""Seconds for which a rank waits for a master that is away."""
_BROKEN = OSError, InfrastructureError, framing.FrameTooLongError, msgspec.DecodeError
_decoder = decoding.msgpack_decoder(Members)


class Link:
    """The newest known membership. One thread reads what the agent pushes; any thread asks."""

    def __init__(self, given: launched.Given) -> None:
        self._given = given
        self._master = RelayedMaster(given.relay)
        self._asking = threading.Lock()
        self._pause = threading.Event()  # never set
        self._changed = threading.Condition()
        self._members: Members | None = None
        self.on_change: Callable[[Members], None] = lambda _members: None
        """Called in the reading thread after each change."""
        threading.Thread(target=self._read, name="dlrover-members", daemon=True).start()

    # ---- what is known

    def _read(self) -> None:
        while True:
            with contextlib.suppress(*_BROKEN), connected(self._given.members) as sock:
                sock.settimeout(None)
                while True:
                    self._take(_decoder.decode(framing.receive(sock.recv_into)))
            self._pause.wait(RETRY)

    def _take(self, members: Members) -> None:
        if members.round != self._given.round:
            return
        with self._changed:
            known = self._members
            if known is not None and (members.number, members.over) <= (known.number, known.over):
                return
            self._members = members
            self._changed.notify_all()
        self.on_change(members)

    def wait(self, holds: Callable[[Members], bool], seconds: float) -> Members | None:
        """Return the newest membership once it ``holds``; None if it does not within ``seconds``."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._members is not None and holds(self._members), seconds
            )
            found = self._members
        return found if found is not None and holds(found) else None

    @property
    def members(self) -> Members | None:
        """The newest known membership."""
        return self._members

    @property
    def number(self) -> int:
        """Number of the newest known membership; -1 for none."""
        return self._members.number if self._members is not None else -1

    @property
    def over(self) -> bool:
        """True once a rank has finished the training."""
        return self._members is not None and self._members.over

    # ---- requests

    def ask(self, request: MembershipRequest) -> MembershipReply:
        """Return the master's reply; wait for a master that is away.

        Raises:
            InfrastructureError: No master answers within `AWAY_LIMIT`, or it refuses the request.
        """
        end = time.monotonic() + AWAY_LIMIT
        while True:
            with self._asking:
                reply = self._master.ask(request)
            if isinstance(reply, Met | MembersNow):
                if isinstance(reply, MembersNow) and reply.members is not None:
                    self._take(reply.members)
                return reply
            assert isinstance(reply, Unanswered)
            if reply.refused or time.monotonic() > end:
                raise InfrastructureError(reply.refused or reply.away)
            self._pause.wait(RETRY)


def open_link() -> Link:
    """Return this worker's link.

    Raises:
        ConfigurationError: The program was not started by ``dlrover-run --survive``.
    """
    given = launched.given
    if not (given.survive and given.members and given.relay):
        raise ConfigurationError(
            "Replicas need a launcher that keeps them: start the program with dlrover-run --survive."
        )
    link = Link(given)
    launched.trains = lambda: not link.over
    return link
