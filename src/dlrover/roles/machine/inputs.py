"""Inputs of the machine of a job of several roles, which are journalled before they are handled, and its commands."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dlrover.roles.machine.health import Stuck
from dlrover.roles.messages import MemberEnded, MemberPlace, MemberStarted
from dlrover.roles.spec import RolesJob
from dlrover.spec import events

# ---- inputs


class Submitted(msgspec.Struct, frozen=True, tag="submitted"):
    """The job begins."""

    job: RolesJob


class CoordinatorStarted(msgspec.Struct, frozen=True, tag="coordinator_started"):
    """Another coordinator process goes on."""

    replayed: int


class RoleLaunched(msgspec.Struct, frozen=True, tag="launched"):
    """The job of a role runs; ``handle`` finds it again."""

    role: str
    attempt: int
    handle: str


class InstanceUp(msgspec.Struct, frozen=True, tag="up"):
    """The processes of an instance are being started."""

    role: str
    attempt: int
    index: int
    round: int
    """Round of the role's own job, which grows with each start within the attempt."""
    seq: int
    """Number of the event in the role's job that says so."""
    node: int = -1
    """The node of the role's job that it has for itself; -1: it is a worker of a world."""


class InstanceDown(msgspec.Struct, frozen=True, tag="down"):
    """An instance has ended; its role's job decides about its restart."""

    role: str
    attempt: int
    index: int
    reason: str
    seq: int
    failed: bool = True


class Spent(msgspec.Struct, frozen=True, tag="spent"):
    """How many seconds a life of an instance has worked and was idle, as far as is known at its end."""

    place: MemberPlace
    worked: float
    idled: float


class KeeperDown(msgspec.Struct, frozen=True, tag="keeper_down"):
    """A process that kept weights has ended; the fields are those of the event `KeeperEnded`."""

    keeper: str
    reason: str
    lost: dict[str, str]
    left: dict[str, str]


class RoleExited(msgspec.Struct, frozen=True, tag="exited"):
    """The job of a role has ended."""

    role: str
    attempt: int
    exit_code: int
    reason: str
    hopeless: bool = False
    """True if a restart would fail in the same way."""
    vanished: bool = False
    """True if its dlrover-run died without an outcome: the program did not fail."""


class StopRequested(msgspec.Struct, frozen=True, tag="stop"):
    """A user stops the job."""

    reason: str
    exit_code: int


Input: TypeAlias = (
    Submitted | CoordinatorStarted | RoleLaunched | InstanceUp | InstanceDown | Stuck
    | Spent | KeeperDown | RoleExited | StopRequested
)  # fmt: skip

# ---- commands


class StartRole(msgspec.Struct, frozen=True):
    """Start the job of a role."""

    role: str
    attempt: int


class StopRole(msgspec.Struct, frozen=True):
    """Stop the job of a role; `RoleExited` follows."""

    role: str
    attempt: int


class EndInstance(msgspec.Struct, frozen=True):
    """End the processes of an instance; its role's job then restarts it, as after any failure."""

    place: MemberPlace
    reason: str
    node: int
    """As in `InstanceUp`."""


class EndJob(msgspec.Struct, frozen=True):
    """All roles have ended, and so does the job."""

    exit_code: int
    reason: str
    role: str
    """The role with the root cause; empty if there is none."""


class Emit(msgspec.Struct, frozen=True):
    """Record an event."""

    body: events.EventBody


Command: TypeAlias = (
    StartRole | StopRole | MemberStarted | MemberEnded | EndInstance | EndJob | Emit
)
"""`MemberStarted` and `MemberEnded` go to the processes of all roles."""
