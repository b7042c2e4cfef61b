"""What one server holds: rows of the slots that belong to it, and the last push of each client to each slot."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dlrover._native.tables import slots_of
from dlrover.embedding.machine import chain
from dlrover.embedding.machine.chain import TableManifest
from dlrover.embedding.options import decoded
from dlrover.embedding.remote.arrays import Arrays
from dlrover.embedding.remote.wire import PART_BITS, RowsHeld
from dlrover.embedding.table import HashTable
from dlrover.errors import ProtocolError
from dlrover.spec.requests.placement import SLOTS, LoadTables, PlacementReply

Keys: TypeAlias = NDArray[np.int64]
Rows: TypeAlias = NDArray[np.float32]
Slots: TypeAlias = NDArray[np.intp]
Clocks: TypeAlias = Mapping[str, NDArray[np.int64]]
"""For tables whose rows expire by updates, the updates that the last uses of each slot's rows were counted by."""

PORTION = 1 << 26
"""Bytes of rows after which slots that are given away go into another frame."""
MAX_CLIENTS = 4096
"""Clients whose last pushes are kept; the one that has been silent longest is forgotten first."""


class OutdatedPlacementError(ProtocolError):
    """Raised when a server does not answer by the placement that it knows: asking again may help."""


class _Client:
    """Last pushes of one client."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.applied = np.zeros(SLOTS, np.uint64)


class HeldSlots:
    """The rows of one server. Calls may come from several threads."""

    def __init__(self) -> None:
        self._tables: dict[str, HashTable] = {}
        self._numbers: list[str] = []
        self._clients: OrderedDict[int, _Client] = OrderedDict()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._active: set[int] = set()
        self._begun = 0
        self._pushing, self._held_back = 0, False
        self._owned = np.zeros(SLOTS, np.bool_)
        self._loading: LoadTables | None = None
        self._given: dict[int, int] = {}  # slots, and the placement by which they were given
        self._copying = threading.Lock()
        self._copied_for = ""  # the checkpoint since which changes are marked
        self._present = np.zeros(SLOTS, np.bool_)  # slots that may have rows here
        self._used = np.zeros(SLOTS, np.int64)  # keys of requests, by slot

    # ---- the placement

    def follow(self, placement: PlacementReply, server: int) -> None:
        """Take over a newer placement: open its tables, answer for this server's slots, drop those that left.

        A slot that another server has fetched stays closed until the placement says whose it is.
        """
        self.open_tables(placement)
        me = placement.servers.get(server)
        ready = me is not None and me.ready
        mine = np.array([owner == server for owner in placement.owners], np.bool_)
        mine = mine if len(mine) else np.zeros(SLOTS, np.bool_)
        with self._lock:
            self._given = {
                slot: version
                for slot, version in self._given.items()
                if placement.version < version or (mine[slot] and slot in placement.moves)
            }
            self._loading = placement.loading
            owned = mine & ready
            owned[list(self._given)] = False
            self._owned = owned
        arriving = [slot for slot, target in placement.moves.items() if target == server]
        gone = self._present & ~mine
        gone[arriving] = False
        if ready and gone.any():
            self._wait_for_requests()
            self._remove(np.flatnonzero(gone))
        self._present = (self._present & ~gone) | mine

    def open_tables(self, placement: PlacementReply) -> None:
        """Make the tables that are open in a placement and unknown here."""
        with self._lock:
            for name, options in placement.tables.items():
                if name not in self._tables:
                    table = HashTable.of(decoded(options))
                    self._tables = {**self._tables, name: table}  # other threads go through it
                    self._numbers.append(name)

    def give(self, slots: Iterable[int], version: int) -> None:
        """Answer for some slots no more, by a version of the placement; return once no request uses them."""
        with self._lock:
            self._given.update(dict.fromkeys(slots, version))
            owned = self._owned.copy()
            owned[list(self._given)] = False
            self._owned = owned
        self._wait_for_requests()

    def _wait_for_requests(self) -> None:
        with self._idle:
            last = self._begun
            self._idle.wait_for(lambda: not any(number <= last for number in self._active))

    @contextmanager
    def _using(self) -> Iterator[NDArray[np.bool_]]:
        """Hold the slots that are owned now until the end of a request.

        Raises:
            OutdatedPlacementError: Tables are being loaded.
        """
        with self._lock:
            if self._loading is not None:
                raise OutdatedPlacementError(
                    f"The load of step {self._loading.step} of the embedding tables is not over."
                )
            self._begun += 1
            number = self._begun
            self._active.add(number)
            owned = self._owned
        try:
            yield owned
        finally:
            with self._idle:
                self._active.discard(number)
                self._idle.notify_all()

    @contextmanager
    def _applying(self) -> Iterator[None]:
        """Apply a push, once none is held back."""
        with self._idle:
            self._idle.wait_for(lambda: not self._held_back)
            self._pushing += 1
        try:
            yield
        finally:
            with self._idle:
                self._pushing -= 1
                self._idle.notify_all()

    @contextmanager
    def _without_pushes(self) -> Iterator[None]:
        """Hold pushes back: rows have those that their clients' last pushes say, and no others."""
        try:
            with self._idle:
                self._held_back = True
                self._idle.wait_for(lambda: not self._pushing)
            yield
        finally:
            with self._idle:
                self._held_back = False
                self._idle.notify_all()

    def owned(self) -> Slots:
        """Return the slots that this server answers for."""
        return np.flatnonzero(self._owned)

    # ---- requests

    def knows(self, number: int) -> bool:
        """Return whether a table is open here."""
        return number < len(self._numbers)

    def knows_tables_of(self, arrays: Arrays) -> bool:
        """Return whether the tables that another server exported are open here: rows of others would be left out."""
        names = {path.partition("/")[2] for path in arrays if path.startswith("keys/")}
        return names <= self._tables.keys()

    def table(self, number: int) -> HashTable:
        """Return a table by its number.

        Raises:
            ProtocolError: There is none.
        """
        if not self.knows(number):
            raise ProtocolError(f"The embedding server knows no table {number}.")
        return self._tables[self._numbers[number]]

    def rows(self, number: int, keys: Keys, *, insert: bool) -> Rows | None:
        """Return rows of keys; None if not all keys belong to this server."""
        with self._using() as owned:
            slots = slots_of(keys)
            if not owned[slots].all():
                return None
            self._count(slots)
            table = self.table(number)
            return table.lookup(keys) if insert else table.peek(keys)

    def push(self, number: int, client: int, sequence: int, keys: Keys, gradients: Rows) -> bool:
        """Apply gradients, those of a repeated push only to slots that it has not reached.

        Returns:
            False if not all keys belong to this server; nothing was applied then.
        """
        with self._using() as owned, self._applying():
            slots = slots_of(keys)
            if not owned[slots].all():
                return False
            self._count(slots)
            table, last = self.table(number), self._client(client)
            with last.lock:
                fresh = last.applied[slots] < sequence
                counts = sequence >> PART_BITS > int(last.applied.max()) >> PART_BITS
                if fresh.all():
                    table.update(keys, gradients, counts=counts)
                elif fresh.any():
                    table.update(keys[fresh], gradients[fresh], counts=counts)
                last.applied[slots[fresh]] = sequence
            return True

    def _count(self, slots: Slots) -> None:
        counts = np.bincount(slots, minlength=SLOTS)
        with self._lock:
            self._used += counts

    def used(self) -> dict[int, int]:
        """Return how many keys requests had since the last call, by slot; slots without any are left out."""
        with self._lock:
            used, self._used = self._used, np.zeros(SLOTS, np.int64)
        slots = np.flatnonzero(used)
        return dict(zip(slots.tolist(), used[slots].tolist(), strict=True))

    def _client(self, client: int) -> _Client:
        with self._lock:
            found = self._clients.setdefault(client, _Client())
            self._clients.move_to_end(client)
            while len(self._clients) > MAX_CLIENTS:
                self._clients.popitem(last=False)
            return found

    # ---- slots as a whole

    def export_changes(self, id_: str, parent: str) -> tuple[dict[str, NDArray[np.generic]], int]:
        """Return what changed in this server's slots since the copy for ``parent``, and its number of rows.

        Everything, if ``parent`` is empty. Marks of changes are one for all checkpoints, so an increment must add to
        the last one that rows were copied for, or that they were restored from.

        Raises:
            ProtocolError: It would not; nothing was copied.
        """
        with self._copying, self._using() as owned, self._without_pushes():
            if parent and parent != self._copied_for:
                raise ProtocolError(
                    f"The rows changed since checkpoint {self._copied_for or '(none)'}, not {parent}, are known."
                )
            self._copied_for = id_
            found = self.export(np.flatnonzero(owned), changed=bool(parent), keep=False)
        return found, sum(len(array) for path, array in found.items() if path.startswith("keys/"))

    def portions(self, slots: Slots) -> list[Slots]:
        """Divide slots into parts that fit into frames."""
        nbytes = np.zeros(len(slots))
        for table in self._tables.values():
            nbytes += table.nbytes_of(slots)
        ends = np.flatnonzero(np.diff(np.cumsum(nbytes) // PORTION)) + 1
        return [part for part in np.split(slots, ends) if len(part)]

    def export(
        self, slots: Slots, *, changed: bool = False, keep: bool = True
    ) -> dict[str, NDArray[np.generic]]:
        """Return everything about some slots as named arrays: rows of each table, and the clients' last pushes."""
        found: dict[str, NDArray[np.generic]] = {"slots": slots.astype(np.uint16)}
        with self._lock:
            clients = dict(self._clients)
        found["clients"] = np.array(list(clients), np.uint64)
        found["applied"] = np.array(
            [each.applied[slots] for each in clients.values()], np.uint64
        ).reshape(len(clients), len(slots))
        for name, table in self._tables.items():
            if table.clock is not None:
                found[f"clock/{name}"] = np.array([table.clock], np.uint64)
            for field, array in table.export_rows(slots, changed=changed, keep=keep).items():
                found[f"{field}/{name}"] = array
        return found

    def restore(self, arrays: Arrays) -> None:
        """Take in what another server exported, in place of what is held of these slots."""
        slots = arrays["slots"].astype(np.intp)
        self._remove(slots)
        self._present[slots] = True
        clocks = {
            path.removeprefix("clock/"): np.full(SLOTS, array[0], np.int64)
            for path, array in arrays.items()
            if path.startswith("clock/")
        }
        self._set_clocks(clocks)
        self._take_in(arrays, slots, clocks, changed=True)

    def load(self, attempt: str, manifest: TableManifest, parts: Iterable[Arrays]) -> None:
        """Replace all rows by those of a checkpoint, by an attempt that is the latest one.

        Raises:
            ProtocolError: It is not, or another one has begun meanwhile.
        """

        def wanted() -> Iterator[Arrays]:
            for part in parts:
                self._check_load(attempt, manifest.step)
                yield part

        with self._copying:
            self._check_load(attempt, manifest.step)
            self._wait_for_requests()  # those that began before: they use the rows until then
            self._replay(manifest, wanted(), self.owned())

    def _check_load(self, attempt: str, step: int) -> None:
        now = self._loading
        if now is None or (now.attempt, now.phase) != (attempt, "loading"):
            raise ProtocolError(f"The load of step {step} was given up.")

    def replay(self, manifest: TableManifest, parts: Iterable[Arrays], slots: Slots) -> None:
        """Take in the parts of the chain of a checkpoint, as far as they are about ``slots``.

        Where this server answers for others, too, its next copy for a checkpoint must be of everything.
        """
        with self._copying:
            self._replay(manifest, parts, slots)

    def _replay(self, manifest: TableManifest, parts: Iterable[Arrays], slots: Slots) -> None:
        self._copied_for = ""
        self._remove(slots)
        self._present[slots] = True
        clocks = chain.clocks(manifest)
        self._set_clocks(clocks)
        other = {
            name
            for name, text in manifest.tables.items()
            if name in self._tables
            and decoded(text).counts_updates != self._tables[name].options.counts_updates
        }
        for part in parts:
            self._take_in(part, slots, clocks, changed=False, renewed=other)
        others = self._owned.copy()
        others[slots] = False
        self._copied_for = "" if others.any() else manifest.id

    def _set_clocks(self, clocks: Clocks) -> None:
        """Let tables without rows go on counting updates where their rows come from."""
        for name, of_slots in clocks.items():
            table = self._tables.get(name)
            if table is not None and not len(table):
                table.step = int(of_slots.max())

    def _take_in(
        self,
        arrays: Arrays,
        slots: Slots,
        clocks: Clocks,
        *,
        changed: bool,
        renewed: Collection[str] = (),
    ) -> None:
        """Take in rows; those of ``renewed`` tables count as used now, since their last use was counted otherwise."""
        chosen = np.zeros(SLOTS, np.bool_)
        chosen[slots] = True
        tables: dict[str, dict[str, NDArray[np.generic]]] = {}
        for path, array in arrays.items():
            field, slash, name = path.partition("/")
            if slash and field != "clock":
                tables.setdefault(name, {})[field] = array
        for name, rows in tables.items():
            if name in self._tables:
                table, mine = self._tables[name], dict(_only(rows, chosen))
                clock = clocks[name][slots_of(mine["keys"])] if name in clocks else None
                if name in renewed:
                    clock, mine["last"] = None, np.full_like(mine["last"], table.now())
                table.restore_rows(mine, changed=changed, clock=clock)
        held = arrays["slots"].astype(np.intp)
        here = chosen[held]
        for client, applied in zip(arrays["clients"].tolist(), arrays["applied"], strict=True):
            found = self._client(client)
            with found.lock:
                latest = np.maximum(found.applied[held[here]], applied[here].astype(np.uint64))
                found.applied[held[here]] = latest

    def forget(self, slots: Slots) -> None:
        """Give back the memory of slots that another server has still."""
        self._remove(slots)

    def _remove(self, slots: Slots) -> None:
        for table in self._tables.values():
            table.remove_slots(slots)

    def evict(self) -> int:
        """Remove what has expired in this server's slots; return how many rows that were."""
        with self._using():
            return sum(table.evict() for table in self._tables.values())

    def rows_held(self) -> RowsHeld:
        """Return the slots that this server answers for, and the number of their rows by table."""
        with self._using() as owned:
            slots = np.flatnonzero(owned)
            rows = {name: table.rows(slots) for name, table in self._tables.items()}
        return RowsHeld(tuple(slots.tolist()), rows)


def _only(rows: Arrays, chosen: NDArray[np.bool_]) -> Arrays:
    """Return the rows, and the removed keys, of the chosen slots."""
    mine, removed = chosen[slots_of(rows["keys"])], chosen[slots_of(rows["removed"])]
    if mine.all() and removed.all():  # those of one server, as it wrote them: rows are not copied
        return rows
    kept = {field: array[mine] for field, array in rows.items() if field != "removed"}
    return kept | {"removed": rows["removed"][removed]}
