"""Messages between the processes of roles and the service of their job, which its coordinator runs.

A process sends a `RoleRequest` and gets one reply. It follows the job on one stream of `JobView`. What changes the
state of the service is a `RoleInput`: the service journals it before it takes effect.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

MAX_NAME = 200
MAX_WAIT = 30.0
"""Maximum seconds that one request may wait for what it asks for; the process asks again."""
MAX_BODY = 3 * 1024 * 1024
"""Maximum bytes of the items in one request or reply."""
MAX_ITEMS = 10_000
"""Maximum items of a queue in one request."""
MAX_CURSOR = 1024 * 1024
"""Maximum bytes of a cursor."""
MAX_TEXT = 4000
"""Characters of a reason that are kept."""
START, WORK, IDLE = "start", "work", "idle"
"""Phases that an instance is in by itself; programs may name others."""
STARTING, LIVE, ENDED = "starting", "live", "ended"
"""States of an instance; one that is live takes calls."""
HOLDER = ".holder"
"""Role of the processes that keep weights; no role of a user has a dot in its name."""
WEIGHTS = "weights"
"""Name of the weights of a job that names none."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Number = Annotated[int, msgspec.Meta(ge=0)]
_Wait = Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT)]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_Cursor = Annotated[bytes, msgspec.Meta(max_length=MAX_CURSOR)] | None
_Numbers = Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_ITEMS)]


class MemberPlace(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One life of one instance of a role."""

    role: _Name
    index: _Number
    attempt: _Number = 0
    """Number of its start by the coordinator."""
    round: _Number = 0
    """Number of its start within the attempt: an elastic role starts its workers anew by itself."""

    @property
    def life(self) -> tuple[int, int]:
        """What orders the lives of one instance."""
        return (self.attempt, self.round)

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


def weights_in_words(name: str) -> str:
    """Return ``weights``, or ``weights policy`` of those that a job has named so."""
    return "weights" if name == WEIGHTS else f"weights {name}"


class CallAddress(msgspec.Struct, frozen=True, array_like=True):
    """Where a process takes calls."""

    host: str = ""
    port: int = 0
    machine: str = ""
    """Identifies the machine and its network namespace; processes with the same one use the Unix socket."""
    local: str = ""
    """Name of the Unix socket in the abstract namespace."""
    fingerprint: bytes = b""
    """Of the certificate that it shows by TCP; empty: the job does not use TLS."""


class Version(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One version of weights. After a rollback, versions belong to the next epoch and count as newer."""

    epoch: _Number
    step: _Number

    def __str__(self) -> str:
        return f"{self.step}" if not self.epoch else f"{self.step} (epoch {self.epoch})"


# ---- from the coordinator


class MemberStarted(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """The coordinator starts an instance; earlier lives of it are over."""

    place: MemberPlace


class MemberEnded(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """An instance has ended. What it held goes to others."""

    place: MemberPlace
    reason: _Text
    final: bool = True
    """False if only its connection was lost: it may come back."""


# ---- from processes


class JoinRole(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """The process has started and takes calls at an address."""

    place: MemberPlace
    address: CallAddress
    methods: dict[str, bool] = {}
    """Names of the methods that others may call; True for idempotent ones."""
    pid: Annotated[int, msgspec.Meta(ge=1)] = 1
    instances: _Number = 1
    """Instances of its role."""
    ready: bool = True
    """False while it still prepares for calls."""


class Resumed(msgspec.Struct, frozen=True, array_like=True, tag="resumed"):
    """The process goes on from a step: what it has published and learned after it never was.

    An elastic role goes on as a whole: all its processes may say so after each of its starts, and it counts once. An
    instance of any other role speaks for itself alone.
    """

    place: MemberPlace
    step: _Number
    count: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Which of the process's messages of this kind it is."""


class OpenQueue(msgspec.Struct, frozen=True, array_like=True, tag="queue"):
    """A queue that the process uses, and how. All must use it alike."""

    place: MemberPlace
    queue: _Name
    size: Annotated[int, msgspec.Meta(ge=1)]
    kind: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""


class PutItems(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Items to add to a queue: all or none. A repeated request counts once."""

    place: MemberPlace
    queue: _Name
    producer: _Number
    sequence: _Number
    items: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_ITEMS)]
    cursor: _Cursor = None
    """Cursor of the producer's instance, set at the same instant; None: unchanged."""
    wait: _Wait = 0.0


class GetItems(msgspec.Struct, frozen=True, array_like=True, tag="get"):
    """Lease up to ``count`` items. A repeated request gets the same items."""

    place: MemberPlace
    queue: _Name
    consumer: _Number
    sequence: _Number
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_ITEMS)]
    least: Annotated[int, msgspec.Meta(ge=1, le=MAX_ITEMS)] = 1
    """Lease nothing while fewer items are waiting."""
    wait: _Wait = 0.0


class AckItems(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """Leased items that are done, and are never leased again."""

    place: MemberPlace
    queue: _Name
    numbers: _Numbers
    step: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Step whose state has learned from them: they are leased again if who learned goes back behind it. -1: none."""
    cursor: _Cursor = None
    """As in `PutItems`."""


class SetCursor(msgspec.Struct, frozen=True, array_like=True, tag="cursor"):
    """The instance's cursor, which its next life finds."""

    place: MemberPlace
    cursor: Annotated[bytes, msgspec.Meta(max_length=MAX_CURSOR)]


class PublishPart(msgspec.Struct, frozen=True, array_like=True, tag="publish"):
    """One rank's part of a version of weights lies complete at a holder."""

    place: MemberPlace
    name: _Name
    step: _Number
    part: _Number
    parts: Annotated[int, msgspec.Meta(ge=1)]
    """Number of parts of the version, which is visible once it has all of them."""
    holder: MemberPlace
    key: _Name
    """What the holder knows the part by."""
    nbytes: _Number = 0


class UseVersion(msgspec.Struct, frozen=True, array_like=True, tag="use"):
    """The instance works with a version from now on; None: with none yet, but it will."""

    place: MemberPlace
    name: _Name
    version: Version | None


# ---- from processes; these change nothing


class LookCursor(msgspec.Struct, frozen=True, array_like=True, tag="look_cursor"):
    """Request for the instance's cursor."""

    place: MemberPlace


class LookQueue(msgspec.Struct, frozen=True, array_like=True, tag="look_queue"):
    """Request for the length of a queue."""

    place: MemberPlace
    queue: _Name


RoleInput: TypeAlias = (
    MemberStarted | MemberEnded | JoinRole | Resumed | OpenQueue | PutItems | GetItems | AckItems
    | SetCursor | PublishPart | UseVersion
)  # fmt: skip
"""What changes the state of the service; the journal holds these."""
RoleRequest: TypeAlias = (
    JoinRole | Resumed | OpenQueue | PutItems | GetItems | AckItems | SetCursor | PublishPart
    | UseVersion | LookCursor | LookQueue
)  # fmt: skip


# ---- replies


class Agreed(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """The request has taken effect."""


class Later(msgspec.Struct, frozen=True, array_like=True, tag="later"):
    """Nothing has changed: what was asked for is not there yet; ask again."""


class Turned(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """Asking again would not help."""

    why: str


class LeasedItem(msgspec.Struct, frozen=True, array_like=True):
    """An item of a queue."""

    number: int
    body: bytes
    deliveries: int = 1
    """How often it was leased, this time included."""


class LeasedItems(msgspec.Struct, frozen=True, array_like=True, tag="items"):
    """What `GetItems` gets."""

    items: tuple[LeasedItem, ...]


class CursorIs(msgspec.Struct, frozen=True, array_like=True, tag="cursor_is"):
    """The instance's cursor; None if it was never set."""

    cursor: bytes | None


class QueueStatus(msgspec.Struct, frozen=True, array_like=True, tag="queue_is"):
    """One queue."""

    waiting: int = 0
    """Items that wait to be leased."""
    leased: int = 0
    size: int = 0
    added: int = 0
    """Items that were ever put."""
    done: int = 0
    """Items that are acknowledged."""
    redelivered: int = 0
    lost: int = 0
    """Acknowledged items that a rollback wanted again and that were no longer kept."""


class PublishedAs(msgspec.Struct, frozen=True, array_like=True, tag="published"):
    """The part is known."""

    version: Version
    view: int = 0
    """Number of the first view that shows it."""


RoleReply: TypeAlias = Agreed | Later | Turned | LeasedItems | CursorIs | QueueStatus | PublishedAs


# ---- the view of the job


class MemberView(msgspec.Struct, frozen=True, array_like=True):
    """One instance of a role as others see it: its latest life."""

    place: MemberPlace
    state: str
    """`STARTING`, `LIVE` or `ENDED`."""
    serving: bool = False
    """True if it is live and, where its role uses weights, has the version that counts."""
    address: CallAddress = CallAddress()
    methods: dict[str, bool] = {}
    using: dict[str, Version] = {}
    """Version of each named weights that it works with."""
    reason: str = ""
    """Why it, or its life before, has ended."""
    pid: int = 0


class RoleView(msgspec.Struct, frozen=True, array_like=True):
    """One role."""

    epoch: int
    """Changes whenever the members, or which of them serve, change."""
    members: tuple[MemberView, ...]
    instances: int = 0
    """Wanted number of them, as the latest that joined knows it."""


class PartView(msgspec.Struct, frozen=True, array_like=True):
    """Where a part of a version lies."""

    part: int
    holder: MemberPlace
    key: str
    nbytes: int


class VersionView(msgspec.Struct, frozen=True, array_like=True):
    """A visible version of weights."""

    version: Version
    parts: tuple[PartView, ...]


class WeightsView(msgspec.Struct, frozen=True, array_like=True):
    """Named weights. The last of its versions is the current one."""

    role: str
    """The role that publishes them."""
    rollbacks: tuple[int, ...] = ()
    """Step that its publishers went back to at the end of each epoch."""
    versions: tuple[VersionView, ...] = ()
    """Oldest first; all are valid."""
    lost: Version | None = None
    """The newest version that was visible and is no longer to be had, because a holder died."""
    pending: tuple[PartView, ...] = ()
    """Parts of a version that is not visible yet, because others are missing."""

    def listed(self, holder: MemberPlace) -> set[str]:
        """Return the keys of all parts that a holder keeps."""
        parts = [*self.pending, *(part for version in self.versions for part in version.parts)]
        return {part.key for part in parts if part.holder == holder}

    def valid(self, version: Version) -> bool:
        """Return whether no rollback has undone a version."""
        return all(version.step <= step for step in self.rollbacks[version.epoch :])


class Pulse(msgspec.Struct, frozen=True, array_like=True):
    """An instance's report of its phase; no journal has it."""

    place: MemberPlace
    phase: _Name
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds since the phase began."""
    still: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds since the phase began or the last progress was made, whatever is later."""
    progress: _Number = 0
    """Calls ended, items put or acknowledged, versions published, steps made, and what the program counts itself."""
    worked: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Seconds in which the process has worked so far, or was in a phase that its program names."""
    idled: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Seconds in which it was idle."""


class PulseReply(msgspec.Struct, frozen=True, array_like=True):
    """What `Pulse` gets."""

    pause: float
    """Seconds until the next report."""
    end: str = ""
    """Why the process must end itself; empty: it need not."""


class WatchJob(msgspec.Struct, frozen=True, array_like=True):
    """Request for the stream of views. The process counts as connected while it reads the stream."""

    place: MemberPlace


class JobView(msgspec.Struct, frozen=True, array_like=True):
    """All roles and weights of the job."""

    number: int = 0
    roles: dict[str, RoleView] = {}
    weights: dict[str, WeightsView] = {}

    def role(self, name: str) -> RoleView:
        """Return a role; one without members if none has joined."""
        return self.roles.get(name, RoleView(0, ()))

    def member(self, role: str, index: int) -> MemberView | None:
        """Return an instance of a role, if it is known."""
        return next((one for one in self.role(role).members if one.place.index == index), None)


class ServiceStatus(msgspec.Struct, frozen=True):
    """Members, versions of weights and queues, for people."""

    roles: dict[str, RoleView]
    weights: dict[str, WeightsView]
    queues: dict[str, QueueStatus]
