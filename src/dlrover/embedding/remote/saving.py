"""Checkpoints of tables on servers, which one process of the job orders."""

from __future__ import annotations

import contextlib
import logging
import operator
import secrets
import threading
import time
from collections.abc import Iterable, Mapping

import msgspec
from msgspec.structs import replace

from dlrover._util import backoff, sockets
from dlrover.checkpoint.storage.stores import StorageAwayError, open_store
from dlrover.embedding.machine.chain import TableManifest, TablePart
from dlrover.embedding.options import decoded, difference
from dlrover.embedding.remote import parallel, stored, wire
from dlrover.embedding.remote.directory import Directory, half_loaded
from dlrover.embedding.remote.wire import Op, ReplyStatus, RowFrame
from dlrover.errors import ConfigurationError, InfrastructureError, NoRoomError
from dlrover.spec.requests.placement import (
    SLOTS,
    LoadTables,
    OpenTable,
    PlacedServer,
    PlacementReply,
    TablesStored,
)

logger = logging.getLogger(__name__)

REPLY_TIMEOUT = 600.0
"""Seconds that a server may take to copy, to write or to read its rows."""
TIMEOUT = 600.0
"""Seconds to wait for servers that start or slots that move."""
SETTLE = 0.05, 1.0
"""Seconds between looks for servers that start or slots that move."""
CHAIN = 20
"""Checkpoints in a chain; the next one is full again."""


class TableCheckpoints:
    """Checkpoints of all tables of a job in one directory. One thread of one process uses it.

    A save returns when the servers have copied what changed in memory. They write it meanwhile; the checkpoint is
    there once all parts are. A program that ends waits for them. The first save of each object is full, as is the one after a failure.

    Args:
        directory: Source of the placement.
        place: Directory or URL, which all servers reach.
        keep: Checkpoints to keep; older ones are deleted, unless a kept one adds to them.
    """

    def __init__(self, directory: Directory, place: str, *, keep: int = 3) -> None:
        if keep < 1:
            raise ConfigurationError(f"keep is {keep}; it must be 1 or more.")
        self._directory, self._keep = directory, keep
        self._store = open_store(place)
        self._place = self._store.url  # servers may have another working directory
        self._last: TableManifest | None = None
        self._time = 0.0
        """When the latest checkpoint was copied, as far as this is known."""
        self._writing: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, step: int, *, full: bool = False) -> None:
        """Copy all tables as they are now, and begin to write them.

        Raises:
            ConfigurationError: The step is no integer.
            InfrastructureError: The last save has failed, other than by the loss of a server, or servers do not
                answer in time.
        """
        step = _integer(step)
        failed = self._joined()
        if isinstance(failed, _ServerLostError):
            logger.warning("The last save of the embedding tables is given up: %s", failed)
        elif failed is not None:
            raise _failure(failed) from failed
        parent = None if full or (self._last and self._last.number + 1 >= CHAIN) else self._last
        self._last = None  # until this save is complete, the next one is full
        placement = self._whole()
        id_ = stored.begin(self._store)
        if parent is None:
            self._note_times(stored.manifests(self._store))
        until = time.monotonic() + TIMEOUT
        delays = backoff.delays(*SETTLE)
        while True:
            links: dict[int, _OrderLink] = {}
            try:
                self._connect(placement, links)
                if parent is not None and not _copy(links, id_, parent.id, placement.version):
                    parent = None  # what changed since then is not known to all servers
                if parent is None:
                    _copy(links, id_, "", placement.version)
                break
            except (_SlotsMovedError, _ServerLostError) as error:
                _close(links)
                if time.monotonic() > until:
                    raise
                logger.info("%s The tables are copied again.", error)
                threading.Event().wait(next(delays))
                placement, parent = self._whole(), None
            except BaseException:
                _close(links)
                raise
        manifest = TableManifest(
            id=id_,
            parent=parent.id if parent else "",
            number=parent.number + 1 if parent else 0,
            step=step,
            time=max(time.time(), self._time + 1e-3),  # a clock may have been set back
            tables=placement.tables,
            parts=(),
        )
        self._time = manifest.time
        # No daemon: a program that ends waits for its last checkpoint.
        self._writing = threading.Thread(
            target=self._write, args=(manifest, links), name="embedding-save"
        )
        self._writing.start()

    def wait(self) -> None:
        """Wait until the last save is complete.

        Raises:
            InfrastructureError: It has failed.
        """
        failed = self._joined()
        if failed is not None:
            raise _failure(failed) from failed

    def _joined(self) -> Exception | None:
        """Wait until the last save has ended; return why it has failed."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        error, self._error = self._error, None
        return error

    def load(self, step: int | None = None) -> int | None:
        """Restore all tables from the latest checkpoint, or the latest one of a step; return its step.

        A damaged checkpoint is replaced by the one before it, which is logged. Tables that are not open yet are opened
        with the options that they were saved with. No table can be used before this returns; after an error or an
        interrupt, none before a load has succeeded.

        Returns:
            None if there is no checkpoint; nothing has changed then.

        Raises:
            ConfigurationError: The step is no integer, there is no checkpoint of that step, or a table is open with
                another ``dim``, ``dtype`` or optimizer.
            NoRoomError: The rows exceed the limits of a table.
            InfrastructureError: All are damaged, or servers do not answer.
        """
        step = None if step is None else _integer(step)
        self.wait()
        there = stored.manifests(self._store)
        self._note_times(there)
        found = [each for each in there if step in (None, each.step)]
        if not found:
            if step is not None:
                raise ConfigurationError(
                    f"{self._store.location} has no embedding checkpoint of step {step}."
                )
            return None
        attempt = secrets.token_hex(8)
        try:
            taken = next((each for each in found[:-1] if self._loaded(each, attempt)), None)
            if taken is None:
                taken = found[-1]
                self._load(taken, attempt)
        except BaseException:  # some rows may be those of a checkpoint, and others not
            failed = LoadTables(attempt, found[0].step, "failed")
            with contextlib.suppress(ConfigurationError, InfrastructureError):
                self._directory.ask(failed)
            raise
        return taken.step

    def _note_times(self, manifests: Iterable[TableManifest]) -> None:
        self._time = max([self._time, *(each.time for each in manifests)])

    def _loaded(self, manifest: TableManifest, attempt: str) -> bool:
        try:
            self._load(manifest, attempt)
        except _OrderRefusedError as error:
            logger.warning("The checkpoint before it is loaded: %s", error)
            return False
        return True

    def _load(self, manifest: TableManifest, attempt: str) -> None:
        self._open(manifest)
        load = LoadTables(attempt, manifest.step)
        until = time.monotonic() + TIMEOUT
        delays = backoff.delays(*SETTLE)
        while True:
            try:
                self._load_once(manifest, load)
                break
            except (_SlotsMovedError, _ServerLostError) as error:
                if time.monotonic() > until:
                    raise
                logger.info("%s They are loaded again.", error)
            threading.Event().wait(next(delays))
        self._last = manifest

    def _open(self, manifest: TableManifest) -> None:
        """Open the tables of a checkpoint that are not open, so that no rows are left out; refuse other ones' rows."""
        tables = self._directory.look(-1).tables
        for name, text in manifest.tables.items():
            if name not in tables:
                self._directory.ask(OpenTable(name, text))
                continue
            stored_as, opened_as = decoded(text), decoded(tables[name])
            found = difference(stored_as, opened_as)
            if found:
                raise ConfigurationError(
                    f"The embedding checkpoint of step {manifest.step} in {self._store.location} has the table {name}"
                    f" with {found}, and it is open with {difference(opened_as, stored_as)}: open it as it was saved,"
                    " or give another directory."
                )

    def _load_once(self, manifest: TableManifest, load: LoadTables) -> None:
        self._directory.ask(load)
        self._settled()
        placement = self._directory.ask(replace(load, phase="loading"))
        if placement.moves or not all(server.ready for server in placement.servers.values()):
            raise _SlotsMovedError("Slots moved before the embedding tables were loaded.")
        links: dict[int, _OrderLink] = {}
        try:
            self._connect(placement, links)
            order = wire.Load(load.attempt, self._place, manifest.id, placement.version)
            _on_all(links, Op.LOAD, dict.fromkeys(links, msgspec.json.encode(order)))
        finally:
            _close(links)
        # Servers that start from now on recover from this checkpoint; those that did before have other rows.
        now = self._directory.ask(TablesStored(manifest.step, manifest.id, self._place))
        for index, server in placement.servers.items():
            found = now.servers.get(index)
            if found is None or found.start != server.start or not found.ready:
                raise _ServerLostError(
                    f"Embedding server {index} was lost while the embedding tables were loaded."
                )
        self._directory.ask(replace(load, phase="over"))

    # ---- the thread

    def _write(self, manifest: TableManifest, links: Mapping[int, _OrderLink]) -> None:
        try:
            bodies = {
                index: msgspec.json.encode(wire.Write(self._place, manifest.id, index))
                for index in links
            }
            replies = _on_all(links, Op.WRITE, bodies)
            parts = tuple(wire.decoded(body, TablePart) for body in replies.values())
            manifest = msgspec.structs.replace(manifest, parts=parts)
            stored.publish(self._store, manifest)
            self._directory.ask(TablesStored(manifest.step, manifest.id, self._place))
            self._last = manifest if self._pruned() else None  # then the next one is full
        except Exception as error:  # noqa: BLE001 - the next call raises it
            self._error = error
            logger.warning(
                "The save of step %d of embedding tables fails: %s", manifest.step, error
            )
            stored.give_up(self._store, manifest.id)
        finally:
            _close(links)

    def _pruned(self) -> bool:
        """Delete older checkpoints; return whether the latest can be restored, as far as that is known."""
        try:
            return stored.prune(self._store, self._keep)
        except InfrastructureError as error:
            logger.warning("Older checkpoints of embedding tables are kept: %s", error)
            return True

    # ---- servers

    def _whole(self) -> PlacementReply:
        """Return the placement of tables that have settled, and that no load has left half loaded."""
        placement = self._settled()
        if placement.loading is not None:
            raise InfrastructureError(half_loaded(placement.loading))
        return placement

    def _settled(self) -> PlacementReply:
        """Return the placement once all servers are ready and no slot moves."""
        began = time.monotonic()
        for delay in backoff.delays(*SETTLE):
            placement = self._directory.look(-1)
            waiting = [str(i) for i, server in placement.servers.items() if not server.ready]
            if placement.owners and not waiting and not placement.moves:
                return placement
            if time.monotonic() - began > TIMEOUT:
                what = (
                    f"embedding server {waiting[0]}"
                    if waiting
                    else f"{len(placement.moves)} slots that move"
                )
                raise InfrastructureError(f"Waited {TIMEOUT:.0f} s for {what}.")
            threading.Event().wait(delay)
        raise AssertionError("delays end")

    @staticmethod
    def _connect(placement: PlacementReply, links: dict[int, _OrderLink]) -> None:
        """Connect to all servers that have slots."""
        owners = set(placement.owners)
        for index, server in placement.servers.items():
            if index in owners:
                links[index] = _OrderLink(index, server, placement.secret)


class _OrderLink:
    """A connection to one server for orders."""

    def __init__(self, index: int, server: PlacedServer, secret: bytes) -> None:
        self.index = index
        try:
            self._sock = wire.connect(server.address, server.port, secret, REPLY_TIMEOUT)
        except (OSError, InfrastructureError) as error:
            raise _ServerLostError(f"Embedding server {index} does not answer: {error}.") from error
        self._receiver = wire.FrameReceiver(self._sock)

    def order(self, op: Op, body: bytes) -> bytes:
        """Return the reply to an order."""
        try:
            wire.send(self._sock, RowFrame(op), body)
            reply = self._receiver.receive()
        except OSError as error:
            raise _ServerLostError(
                f"Embedding server {self.index} does not answer: {error}."
            ) from error
        text = bytes(reply.body)
        if reply.status is not ReplyStatus.OK:
            kind = _ERRORS.get(reply.status, _OrderRefusedError)
            raise kind(f"Embedding server {self.index}: {text.decode(errors='replace')}")
        return text

    def close(self) -> None:
        """Close the connection, also if a thread waits for a reply."""
        sockets.end(self._sock)


def _integer(step: object) -> int:
    """Return a step as a number that checkpoints can hold; that of an array or a tensor is of another type."""
    try:
        return operator.index(step)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigurationError(f"step is {step!r}; an integer is accepted.") from error


def _failure(error: Exception) -> InfrastructureError:
    return InfrastructureError(f"The last save of the embedding tables has failed: {error}")


class _ServerLostError(InfrastructureError):
    """Raised when a server does not answer: it may start again."""


class _OrderRefusedError(InfrastructureError):
    """Raised when a server cannot do what it was ordered, for example since a checkpoint is damaged."""


class _SlotsMovedError(InfrastructureError):
    """Raised when not each slot was copied or loaded once."""


_ERRORS: dict[ReplyStatus, type[InfrastructureError]] = {
    ReplyStatus.AWAY: StorageAwayError,
    ReplyStatus.FULL: NoRoomError,
    ReplyStatus.MOVED: _SlotsMovedError,
}


def _copy(links: Mapping[int, _OrderLink], id_: str, parent: str, version: int) -> bool:
    """Let all servers copy what changed since ``parent``; return False if one of them does not know that.

    Raises:
        InfrastructureError: A server does not answer.
        _SlotsMovedError: A slot moved meanwhile.
    """
    order = msgspec.json.encode(wire.Export(id_, parent, version))
    replies = _on_all(links, Op.EXPORT, dict.fromkeys(links, order))
    exported = [wire.decoded(body, wire.Exported) for body in replies.values()]
    if any(each.refused for each in exported):
        return False
    held = sorted(slot for each in exported for slot in each.slots)
    if held != list(range(SLOTS)):
        raise _SlotsMovedError("Slots moved while the embedding tables were copied.")
    return True


def _on_all(
    links: Mapping[int, _OrderLink], op: Op, bodies: Mapping[int, bytes]
) -> dict[int, bytes]:
    """Send an order to all servers at once; return their replies."""
    replies = parallel.for_each(
        links, lambda index: links[index].order(op, bodies[index]), lambda: _close(links)
    )
    return dict(zip(links, replies, strict=True))


def _close(links: Mapping[int, _OrderLink]) -> None:
    for link in links.values():
        link.close()
