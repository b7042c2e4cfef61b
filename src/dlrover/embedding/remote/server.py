"""An embedding server: answers for the keys of its slots, and fetches slots that move to it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dlrover.embedding.remote import arrays, wire
from dlrover.embedding.remote.directory import JOURNAL_LOST, Directory, JobEndedError
from dlrover.embedding.remote.holding import HeldSlots, OutdatedPlacementError, Slots
from dlrover.embedding.remote.listener import RowListener, ServerConnection
from dlrover.embedding.remote.wire import Op, ReplyStatus, RowFrame
from dlrover.errors import ConfigurationError, InfrastructureError, NoRoomError, ProtocolError
from dlrover.spec.requests.placement import (
    NO_STEP,
    Announce,
    Leave,
    PlacementReply,
    SlotsFetched,
    SlotsRecovered,
    SlotsRefused,
    SlotsUsed,
)

logger = logging.getLogger(__name__)

POLL = 0.2
"""Seconds between two looks at the placement."""
REPORT = 2.0
"""Seconds between two reports of what is asked of this server."""
RETRY = 2.0
"""Seconds until a checkpoint that could not be read is read again, or a server that did not answer is asked again."""
FETCH_SLOTS = 16
"""Slots that move at once: no key waits longer than its share of the copy takes."""
FETCH_TIMEOUT = 30.0
"""Seconds that another server may take to send slots."""
LEASE = 45.0
"""Seconds that a server answers after it began to ask for a placement in which its slots were its own."""
RENEW = 2.0
"""Seconds between two such questions."""
GIVEN_UP = 60.0
"""Seconds until the rows of a server that others replace, and that does not answer, come from a checkpoint. By then its lease
is over: no update that it confirms gets lost unseen, even if it lives and hears clients, but not the master."""


class FetchedSlots(NamedTuple):
    """Outcome of an attempt to take slots from another server."""

    slots: tuple[int, ...]
    no_room: bool = False
    """Whether there is no room here for the others."""
    ended: bool = False
    """Whether that server has ended: no process listens at its address."""


class EmbeddingServer:
    """One server process.

    Args:
        index: Its number among the job's servers.
        start: Number of this start of it.
        servers: Servers that the job wants now.
        directory: Source of the placement.
        holding: What it holds.
        recover: Restores slots from a checkpoint, and returns its step, or None without one; called when no server has
            their rows.
        address: Address to listen on, and for others to connect to.
    """

    def __init__(
        self,
        index: int,
        start: int,
        servers: int,
        directory: Directory,
        holding: HeldSlots,
        recover: Callable[[PlacementReply, Slots], int | None],
        address: str = "127.0.0.1",
    ) -> None:
        self.index, self.start = index, start
        self._directory, self._holding, self._recover = directory, holding, recover
        self._ended = threading.Event()
        self._nudged = threading.Event()
        self._followed = threading.Condition()
        self._version = -1
        self._reported = time.monotonic()
        self._given_up: dict[tuple[int, int], float] = {}  # when starts were first seen to be lost
        self._back: list[int] = []  # slots whose rows the start before this one has given
        self._listener = RowListener(
            address, lambda sock: ServerConnection(sock, holding, directory, self)
        )
        self.port = self._listener.port
        self._sure_until = time.monotonic() + LEASE
        self._placement = directory.ask(Announce(index, start, address, self.port, servers))
        self._announced = time.monotonic()
        self._secret = self._placement.secret
        self._listener.start(self._secret)

    # ---- life

    def run(self) -> None:
        """Serve until the job ends, `leave` was called and the slots have gone, or a later start has the rows.

        Raises:
            InfrastructureError: The master has lost its journal.
        """
        threading.Thread(target=self._keep_lease, name="lease", daemon=True).start()
        try:
            self._serve()
        except JobEndedError as error:
            logger.info("Embedding server %d ends: %s", self.index, error)
        finally:
            self.close()

    def _serve(self) -> None:
        placed = False
        while not self._ended.is_set():
            placement = self._placement
            me = placement.servers.get(self.index)
            if placed and not placement.owners:
                raise InfrastructureError(JOURNAL_LOST)
            placed = bool(placement.owners)
            replaced = me is not None and me.start != self.start
            if me is None or (replaced and me.ready):
                logger.info("Embedding server %d ends: its slots belong to others", self.index)
                break
            if replaced or me.lost:  # others are about to fetch the rows
                self._look(placement.version)
                continue
            self._follow(placement)
            if placement.owners and not me.ready:
                self._come_back(placement)
            elif self._fetch_moves(placement):
                self._look(placement.version)

    def _follow(self, placement: PlacementReply) -> None:
        self._placement = placement
        self._holding.follow(placement, self.index)
        with self._followed:
            self._version = placement.version
            self._followed.notify_all()

    def _look_later(self) -> None:
        """Look at the placement when what has failed may succeed."""
        self._ended.wait(RETRY)
        self._placement = self._directory.look(-1)

    def _look(self, known: int) -> None:
        """Wait for a newer placement, one interval at most."""
        self._nudged.wait(POLL)
        self._nudged.clear()
        if not self._ended.is_set():
            seconds = time.monotonic() - self._reported
            if seconds < REPORT:
                reply = self._directory.look(known)
            else:
                self._reported += seconds
                used = self._holding.used()
                reply = self._directory.ask(SlotsUsed(self.index, self.start, seconds, used, known))
            if reply.version != known:
                self._placement = reply

    def _keep_lease(self) -> None:
        """Ask whether the slots are this server's own, also while `run` is busy or waits."""
        while not self._ended.wait(RENEW):
            began = time.monotonic()
            try:
                me = self._directory.look(-1).servers.get(self.index)
            except (InfrastructureError, ConfigurationError) as error:
                logger.debug(
                    "The lease of embedding server %d is not renewed: %s", self.index, error
                )
                continue
            if me is not None and me.start == self.start and not me.lost:
                self._sure_until = began + LEASE

    def check_lease(self) -> None:
        """Refuse to answer: the slots may belong to another server.

        Raises:
            OutdatedPlacementError: No placement that says otherwise is younger than `LEASE`.
        """
        if time.monotonic() > self._sure_until:
            raise OutdatedPlacementError(
                f"Embedding server {self.index} has not heard for {LEASE:.0f} s that its slots are its own."
            )

    def catch_up(self, version: int) -> None:
        """Return once this server answers for the slots of a placement.

        Raises:
            OutdatedPlacementError: It does not in time.
        """
        self._nudged.set()
        with self._followed:
            if not self._followed.wait_for(lambda: self._version >= version, FETCH_TIMEOUT):
                raise OutdatedPlacementError(
                    f"Embedding server {self.index} knows placement {self._version}, not {version}."
                )

    def leave(self, directory: Directory) -> None:
        """Give all slots to other servers, then end; the last one goes on until its next start has its rows.

        Raises:
            InfrastructureError: ``directory`` has no master.
        """
        try:
            directory.ask(Leave(self.index, self.start))
        except JobEndedError:
            self._ended.set()
        except ConfigurationError as error:
            logger.info("%s", error)
        self._nudged.set()

    def close(self) -> None:
        """Close all connections."""
        self._ended.set()
        self._nudged.set()
        self._listener.close()

    # ---- slots of others

    def _come_back(self, placement: PlacementReply) -> None:
        """Get the rows of this server's slots: from the start before this one, else from a checkpoint."""
        slots = np.flatnonzero(np.array(placement.owners) == self.index)
        missing = np.setdiff1d(slots, self._back)
        fetched: tuple[int, ...] = ()
        given_up = True
        if len(missing):
            former = placement.servers[self.index].previous
            fetched, given_up = self._fetch_former(former, missing, self._announced)
            self._back += fetched
            missing = np.setdiff1d(missing, fetched)
        if len(missing) and not given_up:
            if not fetched:
                self._look_later()
            return
        step = None
        if len(missing) or not len(slots):
            step = self._recover(placement, missing)
        self._report(SlotsRecovered(self.index, self.start, len(missing), _number(step)))

    def _fetch_moves(self, placement: PlacementReply) -> bool:
        """Fetch slots that move to this server, a few at a time; return whether there are no more for now."""
        if placement.loading is not None and placement.loading.phase == "loading":
            return True  # a slot that moves now would have the rows of before, or none
        by_owner: dict[int, list[int]] = {}
        for slot, target in placement.moves.items():
            if target == self.index:
                by_owner.setdefault(placement.owners[slot], []).append(slot)
        for owner, slots in by_owner.items():
            server = placement.servers[owner]
            if server.lost:
                self._take_over(placement, owner, np.array(slots, np.intp))
                return False
            if not server.ready:
                continue
            some = np.array(slots[:FETCH_SLOTS], np.intp)
            fetched, refused, _ = self._fetch(server.address, server.port, some)
            if fetched:
                self._report(SlotsFetched(self.index, self.start, fetched, placement.version))
                return False
            if refused:
                asked = tuple(slots[:FETCH_SLOTS])
                self._report(SlotsRefused(self.index, self.start, asked, placement.version))
            self._ended.wait(RETRY if server.leaving and refused else POLL)
            self._placement = self._directory.look(-1)  # which may say more, else this is repeated
        return True

    def _report(self, held: SlotsRecovered | SlotsFetched | SlotsRefused) -> None:
        """Report slots that are held now, or not; if a later start has taken this one's place, they are that one's matter."""
        try:
            self._placement = self._directory.ask(held)
        except ConfigurationError as error:
            logger.info("%s", error)
            self._placement = self._directory.look(-1)

    def _take_over(self, placement: PlacementReply, owner: int, slots: Slots) -> None:
        """Get the rows of a lost server's slots: from itself if it lives, else from a checkpoint.

        This server's own rows stay as they are.
        """
        lost = placement.servers[owner]
        since = self._given_up.setdefault((owner, lost.start), time.monotonic())
        given, given_up = self._fetch_former(lost.previous, slots, since)
        if given:
            self._report(SlotsFetched(self.index, self.start, given, placement.version))
            return
        if not given_up:
            self._look_later()
            return
        try:
            step = self._recover(placement, slots)
        except (InfrastructureError, MemoryError) as error:
            self._holding.forget(slots)
            reason = str(error) or "There is no memory for them."
            logger.warning("The slots of a lost server still wait for their rows: %s", reason)
            self._look_later()
            return
        fetched = tuple(slots.tolist())
        got = placement.version, len(slots), _number(step)
        self._report(SlotsFetched(self.index, self.start, fetched, *got))

    def _fetch_former(
        self, former: tuple[str, int] | None, slots: Slots, since: float
    ) -> tuple[tuple[int, ...], bool]:
        """Take the rows of slots from a server that others replace since a time.

        Returns:
            The slots it gave; and whether the rows of the others may come from a checkpoint: it has ended, or it answers no
            client any more.
        """
        if former is None:
            return (), True
        found = self._fetch(*former, slots)
        left = since + GIVEN_UP - time.monotonic()
        given_up = found.ended or found.no_room or left < 0
        if not (found.slots or given_up):
            message = "%d slots get the rows of a checkpoint in %.0f s, unless %s:%d gives them"
            logger.info(message, len(slots), left, *former)
        return found.slots, given_up

    def _fetch(self, address: str, port: int, slots: Slots) -> FetchedSlots:
        """Take the rows of slots from another server: none if it does not answer or refuses."""
        fetched: list[int] = []
        no_room = ended = False
        try:
            with contextlib.closing(
                wire.connect(address, port, self._secret, FETCH_TIMEOUT)
            ) as sock:
                wire.send(sock, RowFrame(Op.FETCH, keys=len(slots)), slots.astype(np.uint16))
                receiver = wire.FrameReceiver(sock)
                while len(fetched) < len(slots):
                    reply = receiver.receive()
                    if reply.status is not ReplyStatus.OK:
                        reason = bytes(reply.body).decode(errors="replace")
                        logger.warning("%s:%d gives no slots: %s", address, port, reason)
                        break
                    found = arrays.unpacked(np.asarray(reply.body))
                    if not self._holding.knows_tables_of(found):  # opened a moment ago
                        self._holding.open_tables(self._directory.look(-1))
                    self._holding.restore(found)
                    fetched += found["slots"].tolist()
        except (NoRoomError, MemoryError) as error:
            no_room = True
            self._holding.forget(np.setdiff1d(slots, fetched))
            reason = str(error) or "There is no memory for it."
            logger.warning("There is no room for slots from %s:%d: %s", address, port, reason)
        except (OSError, InfrastructureError, ProtocolError) as error:
            ended = isinstance(error, ConnectionRefusedError)
            logger.info("No slots from %s:%d: %s", address, port, error)
        return FetchedSlots(tuple(fetched), no_room, ended)

    def check_gift(self, slots: Slots) -> int:
        """Refuse to give slots that do not move from here, and that no later start of this server asks for.

        Returns:
            The version of the placement by which they are given.

        Raises:
            ProtocolError: One of them stays, or is not here.
        """
        placement = self._directory.look(-1)
        me = placement.servers.get(self.index)
        replaced = me is None or me.start != self.start
        for slot in [] if replaced else slots.tolist():
            if slot not in placement.moves or placement.owners[slot] != self.index:
                raise ProtocolError(
                    f"Slot {slot} does not move from embedding server {self.index}."
                )
        return placement.version


def _number(step: int | None) -> int:
    return NO_STEP if step is None else step
