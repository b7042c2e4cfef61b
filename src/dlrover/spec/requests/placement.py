"""Messages about the placement of embedding tables on servers, between the job's processes and its master.

A key belongs to one of `SLOTS` hash slots, and each slot to one server. Slots move between servers; keys do not
change their slots.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

SLOTS = 1024
"""Hash slots of a job's tables. The slot of a key is the top 10 bits of its hash."""
MAX_SERVERS = SLOTS
MAX_TABLES = 1000
MAX_NAME = 200
MAX_OPTIONS = 10_000
"""Maximum characters of a table's options."""
MAX_PATH = 4096
NO_STEP = -1
"""Step of rows that are in no checkpoint: they are lost."""

_Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SERVERS)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_Step = Annotated[int, msgspec.Meta(ge=NO_STEP)]
_Slot = Annotated[int, msgspec.Meta(ge=0, lt=SLOTS)]
_Slots = Annotated[tuple[_Slot, ...], msgspec.Meta(max_length=SLOTS)]


class Announce(msgspec.Struct, frozen=True, array_like=True, tag="announce"):
    """Start of a server, which listens and holds no rows yet."""

    server: _Index
    start: _Number
    """Number of the server's start: a later one replaces an earlier one."""
    address: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
    port: _Port
    servers: Annotated[int, msgspec.Meta(ge=1, le=MAX_SERVERS)]
    """Servers that the job wants at this start."""


class SlotsRecovered(msgspec.Struct, frozen=True, array_like=True, tag="recovered"):
    """The server holds the rows of the slots that belong to it."""

    server: _Index
    start: _Number
    restored: _Number = 0
    """Slots whose rows no server had any more."""
    step: _Step = NO_STEP
    """Step of the checkpoint that has these slots' rows."""


class SlotsFetched(msgspec.Struct, frozen=True, array_like=True, tag="fetched"):
    """The server holds slots that moved to it; the former owner answers for them no more."""

    server: _Index
    start: _Number
    slots: _Slots
    known: _Number | None = None
    """Version of the placement by which it got them; None: an earlier build wrote this to the journal."""
    restored: _Number = 0
    """Slots whose rows no server had any more."""
    step: _Step = NO_STEP
    """Step of the checkpoint that has these slots' rows."""


class SlotsRefused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The server has no room for slots that were to move to it."""

    server: _Index
    start: _Number
    slots: _Slots
    known: _Number
    """Version of the placement by which it asked for them."""


class Leave(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """The server is to end; its slots go to the others first."""

    server: _Index
    start: _Number


class Abandon(msgspec.Struct, frozen=True, array_like=True, tag="abandon"):
    """A server has ended before it gave all its slots away, and the job wants no other in its place."""

    server: _Index
    start: _Number


class Distribute(msgspec.Struct, frozen=True, array_like=True, tag="distribute"):
    """The job wants fewer servers than it did before any had slots: those that have started may be enough."""

    servers: Annotated[int, msgspec.Meta(ge=1, le=MAX_SERVERS)]


class OpenTable(msgspec.Struct, frozen=True, array_like=True, tag="table"):
    """A table that the program uses. Its options are those of the first process that opens it."""

    name: _Name
    options: Annotated[str, msgspec.Meta(max_length=MAX_OPTIONS)]
    """JSON object."""


class TablesStored(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """A complete checkpoint of all tables, from which a lost server recovers."""

    step: _Number
    id: _Name
    place: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH)]
    """Directory or URL."""


class LoadTables(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """What becomes of an attempt to load a checkpoint into all tables. Until one is over, no server answers for any row."""

    attempt: _Name
    """Name of the attempt; one that begins replaces another one."""
    step: _Number
    phase: Literal["settling", "loading", "failed", "over"] = "settling"
    """No slot moves while the servers load; before, those that move or wait for their rows come to rest."""


class LookPlacement(msgspec.Struct, frozen=True, array_like=True, tag="placement"):
    """Request for the placement if its version is not ``known``; -1: in any case."""

    known: Annotated[int, msgspec.Meta(ge=-1)] = -1


class SlotsUsed(msgspec.Struct, frozen=True, array_like=True, tag="used"):
    """What was asked of a server since its last report; also asks for the placement, as `LookPlacement` does."""

    server: _Index
    start: _Number
    seconds: Annotated[float, msgspec.Meta(ge=0.1, le=1e9)]
    """Time since the last report, or since the start."""
    keys: Annotated[dict[_Slot, _Number], msgspec.Meta(max_length=SLOTS)]
    """Keys that were looked up or updated, by slot; slots without any are left out."""
    known: Annotated[int, msgspec.Meta(ge=-1)] = -1


class MoveSlots(msgspec.Struct, frozen=True, array_like=True, tag="move"):
    """Slots that leave a hot server: what the master made of a `SlotsUsed`."""

    server: _Index
    """The hottest server."""
    ratio: float
    """What is asked of it, as a multiple of the servers' mean."""
    expected: float
    """The same for the hottest server afterwards."""
    moves: Annotated[dict[_Slot, _Index], msgspec.Meta(max_length=SLOTS)]
    """The server that each slot goes to, the hottest slot first."""


PlacementRequest: TypeAlias = (
    Announce
    | SlotsRecovered
    | SlotsFetched
    | SlotsRefused
    | Leave
    | Abandon
    | Distribute
    | OpenTable
    | TablesStored
    | LoadTables
    | LookPlacement
    | SlotsUsed
    | MoveSlots
)


class PlacedServer(msgspec.Struct, frozen=True, array_like=True):
    """One server of the placement."""

    start: int
    address: str
    port: int
    ready: bool = False
    """False until it holds the rows of its slots."""
    leaving: bool = False
    previous: tuple[str, int] | None = None
    """Address and port of the start that it replaces, if that one may still answer; its own once it is lost."""
    lost: bool = False
    """True once its node has ended: others get its slots, from a checkpoint unless its process still answers."""


class PlacementReply(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="placed"):
    """The answer to each request."""

    version: int = 0
    """Number of the placement; the other fields are empty if it is the known one."""
    servers: dict[int, PlacedServer] = {}
    owners: tuple[int, ...] = ()
    """The server of each slot; empty until all wanted servers have started."""
    moves: dict[int, int] = {}
    """The server that each moving slot goes to."""
    tables: dict[str, str] = {}
    """Options of each table, by name."""
    stored: TablesStored | None = None
    secret: bytes = b""
    """Secret of the job's servers and their clients."""
    loading: LoadTables | None = None
    """The attempt to load the tables that is not over; it may have failed, and its process may have ended."""
