"""Placement of hash slots on servers: which server answers for which keys, and where slots move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from dlrover.errors import ProtocolError
from dlrover.spec.requests.placement import (
    MAX_TABLES,
    SLOTS,
    Abandon,
    Announce,
    Distribute,
    Leave,
    LoadTables,
    LookPlacement,
    MoveSlots,
    OpenTable,
    PlacedServer,
    PlacementReply,
    PlacementRequest,
    SlotsFetched,
    SlotsRecovered,
    SlotsRefused,
    SlotsUsed,
    TablesStored,
)


@dataclass
class Placement:
    """Placement of one job's tables. Only `handle` changes it."""

    version: int = 0
    servers: dict[int, PlacedServer] = field(default_factory=dict)
    owners: list[int] = field(default_factory=list)
    """The server of each slot; empty until all wanted servers have started."""
    moves: dict[int, int] = field(default_factory=dict)
    """The server that each moving slot goes to."""
    begun: dict[int, int] = field(default_factory=dict)
    """The version by which each slot's last move began, or its owner came back: rows got before lack later updates."""
    tables: dict[str, str] = field(default_factory=dict)
    stored: TablesStored | None = None
    loading: LoadTables | None = None
    """The attempt to load all tables that is not over: their rows are of no one moment."""

    def handle(self, request: PlacementRequest) -> PlacementReply:  # noqa: C901, PLR0912 - one case per request
        """Handle a request and return the placement.

        Raises:
            ProtocolError: The request contradicts the known state; nothing has changed.
        """
        known = -1
        match request:
            case LookPlacement() | SlotsUsed():
                known = request.known
            case Announce():
                self._announce(request)
            case SlotsRecovered():
                self._recovered(request)
            case SlotsFetched():
                self._fetched(request)
            case SlotsRefused():
                self._refused(request)
            case Leave():
                self._leave(request)
            case Abandon():
                self._abandon(request)
            case Distribute():
                self._distribute(request.servers)
            case OpenTable():
                self._open(request)
            case TablesStored():
                self._store(request)
            case LoadTables():
                self._load(request)
            case MoveSlots():
                self._move(request)
        if known == self.version:
            return PlacementReply(version=self.version)
        return PlacementReply(
            version=self.version,
            servers=dict(self.servers),
            owners=tuple(self.owners),
            moves=dict(self.moves),
            tables=dict(self.tables),
            stored=self.stored,
            loading=self.loading,
        )

    def _current(self, request: SlotsRecovered | SlotsFetched | SlotsRefused) -> PlacedServer:
        server = self.servers.get(request.server)
        if server is None or server.start != request.start or server.lost:
            raise ProtocolError(
                f"Start {request.start} of embedding server {request.server} is over; others have taken its place."
            )
        return server

    def _change(self, index: int, server: PlacedServer, **changes: object) -> None:
        changed = replace(server, **changes)
        if self.servers.get(index) != changed:
            self.servers[index] = changed
            self.version += 1

    def _begin(self, slots: Iterable[int]) -> None:
        self.begun.update(dict.fromkeys(slots, self.version))

    def _recovered(self, request: SlotsRecovered) -> None:
        server = self._current(request)
        self._change(request.server, server, ready=True, previous=None)
        if self.servers[request.server] != server:
            self._begin(slot for slot in self.moves if self.owners[slot] == request.server)

    def _announce(self, request: Announce) -> None:
        known = self.servers.get(request.server)
        if known is not None and known.start > request.start:
            raise ProtocolError(
                f"Embedding server {request.server} has start {known.start}; start {request.start} is over."
            )
        if known is not None and known.start == request.start:
            return
        previous = (known.address, known.port) if known is not None and known.ready else None
        if known is not None and previous is None:
            previous = known.previous
        owns = request.server in self.owners
        server = PlacedServer(
            request.start, request.address, request.port, not owns, False, previous
        )
        self.servers[request.server] = server
        self.version += 1
        if not self.owners:
            self._distribute(request.servers)
        elif known is None or known.leaving:
            self._balance()

    def _distribute(self, wanted: int) -> None:
        """Give each of the first servers an equal range of slots once all have started; the tables are empty."""
        if self.owners or len(self.servers) < wanted:
            return
        self.version += 1
        indices = sorted(self.servers)
        self.owners = [indices[slot * len(indices) // SLOTS] for slot in range(SLOTS)]
        for index in indices:
            self.servers[index] = replace(self.servers[index], ready=self.stored is None)

    def _balance(self) -> None:
        """Plan moves until all servers that stay have equal numbers of slots, with as few moves as possible."""
        staying = [index for index, server in sorted(self.servers.items()) if not server.leaving]
        if not staying:
            return
        before = dict(self.moves)
        for slot in [slot for slot, target in self.moves.items() if target not in staying]:
            del self.moves[slot]
        holders = [self.moves.get(slot, owner) for slot, owner in enumerate(self.owners)]
        counts = Counter(holders)
        least, extra = divmod(SLOTS, len(staying))
        order = sorted(staying, key=lambda index: (-counts[index], index))
        quota = {index: least + (place < extra) for place, index in enumerate(order)}
        free = [
            slot for slot in sorted(range(SLOTS), key=lambda slot: slot not in self.moves)
            if holders[slot] not in quota or _over(counts, quota, holders[slot])
        ]  # fmt: skip
        for index in staying:
            own = [slot for slot in free if self.owners[slot] == index]
            for slot in own[: quota[index] - counts[index]]:
                del self.moves[slot]
                free.remove(slot)
                counts[index] += 1
        for index in staying:
            for _ in range(quota[index] - counts[index]):
                self.moves[free.pop()] = index
        self.version += 1
        self._begin(slot for slot, target in self.moves.items() if before.get(slot) != target)

    def _move(self, request: MoveSlots) -> None:
        """Move slots by their use, as far as the servers are still those that it was measured for."""
        staying = {index for index, server in self.servers.items() if not server.leaving}
        added = {
            slot: target
            for slot, target in (request.moves.items() if self.owners else ())
            if target in staying and self.owners[slot] != target and slot not in self.moves
        }
        self.moves |= added
        self.version += bool(added)
        self._begin(added)

    def _fetched(self, request: SlotsFetched) -> None:
        self._current(request)
        moved = [
            slot
            for slot in {*request.slots}
            if self.moves.get(slot) == request.server
            and (request.known is None or self.begun[slot] <= request.known)
        ]
        for slot in moved:
            self.owners[slot] = request.server
            del self.moves[slot]
        left = set(self.owners)
        for index, server in list(self.servers.items()):
            if server.leaving and index not in left:
                del self.servers[index]
        self.version += bool(moved)

    def _refused(self, request: SlotsRefused) -> None:
        """Leave slots where they are, unless their server leaves."""
        self._current(request)
        staying = [
            slot
            for slot in {*request.slots}
            if self.moves.get(slot) == request.server
            and self.begun[slot] <= request.known
            and not self.servers[self.owners[slot]].leaving
        ]
        for slot in staying:
            del self.moves[slot]
        self.version += bool(staying)

    def _leave(self, request: Leave) -> None:
        server = self.servers.get(request.server)
        if server is None or server.start != request.start:
            return  # a later start gets its rows, or has them
        staying = [
            i for i, other in self.servers.items() if i != request.server and not other.leaving
        ]
        if not staying:
            raise ProtocolError(
                f"Embedding server {request.server} is the last one; its rows have no other place."
            )
        if not server.leaving:
            self._change(request.server, server, leaving=True)
            if self.owners:
                self._balance()
            if request.server not in self.owners:
                del self.servers[request.server]

    def _abandon(self, request: Abandon) -> None:
        """Let the servers that stay get the slots of a lost one, from a checkpoint unless its process still answers."""
        server = self.servers.get(request.server)
        staying = any(not other.leaving for i, other in self.servers.items() if i != request.server)
        if server is None or server.start != request.start or server.lost or not staying:
            return
        former = (server.address, server.port) if server.ready else server.previous
        self._change(request.server, server, leaving=True, ready=False, lost=True, previous=former)
        if request.server not in self.owners:
            del self.servers[request.server]
        if self.owners:
            self._balance()

    def _open(self, request: OpenTable) -> None:
        options = self.tables.get(request.name)
        if options is None:
            if len(self.tables) >= MAX_TABLES:
                raise ProtocolError(
                    f"The embedding table {request.name} is one more than {MAX_TABLES}."
                )
            self.tables[request.name] = request.options
            self.version += 1
        elif options != request.options:
            raise ProtocolError(
                f"The embedding table {request.name} is open with the options {options}, and {request.options} are given."
            )

    def _store(self, request: TablesStored) -> None:
        if self.stored != request:
            self.stored = request
            self.version += 1

    def _load(self, request: LoadTables) -> None:
        now = self.loading
        if request.phase != "settling" and (now is None or now.attempt != request.attempt):
            if request.phase == "loading":
                raise ProtocolError(
                    f"The load of step {request.step} of the embedding tables is over: another one has begun."
                )
            return  # a repeated request, or one that comes late
        loading = None if request.phase == "over" else request
        if now != loading:
            self.loading = loading
            self.version += 1

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        assert len(self.owners) in (0, SLOTS)
        assert set(self.owners) <= self.servers.keys(), "a slot belongs to no server"
        for slot, target in self.moves.items():
            assert target in self.servers, "a slot moves to no server"
            assert not self.servers[target].leaving, "a slot moves to a server that leaves"
            assert self.owners[slot] != target, "a slot moves to its owner"


def _over(counts: Counter[int], quota: dict[int, int], holder: int) -> bool:
    """Take one slot from a holder that has more than its quota; return whether it had."""
    if counts[holder] <= quota[holder]:
        return False
    counts[holder] -= 1
    return True
