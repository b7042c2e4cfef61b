"""Membership: which ranks of a running world train, without a new round when one of them is lost.

The world's ranks stay as they are; what changes is the set of those that train, and each change has a number. A
rank may be lost and started again: each of its processes is one *attempt*. Where a replica is spread over several
ranks, these are a *row*: consecutive ranks that train, are lost and start again together.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

from dlrover.spec.numbers import Count, KnownCount, Workers

MAX_KEY = 400
MAX_KEYS = 10_000
"""Maximum number of keys in a request."""
MAX_VALUE = 64 * 1024
"""Maximum bytes of a value."""
_Key = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_KEY)]


class Members(msgspec.Struct, frozen=True, tag="members"):
    """The ranks that train. Replaces the message with a lower number."""

    round: Count
    number: Count
    """Number of the membership within its round; the first is 0."""
    attempts: dict[int, int] = {}
    """Attempt of each rank that trains."""
    over: bool = False
    """True once a rank has finished the training: no rank joins any more."""
    steps: Count = 0
    """Optimizer steps of the training ranks in this round, as far as known when a rank asks to join."""
    row: Workers = 1
    """Ranks of a row."""


def checksum(attempts: Mapping[int, int]) -> int:
    """Return a number that depends on which ranks train, and in which attempts."""
    return zlib.crc32(msgspec.msgpack.encode(sorted(attempts.items())))


class JoinMembers(msgspec.Struct, frozen=True, array_like=True, tag="join_members"):
    """A rank that was started again is ready to train with the others."""

    round: Count
    rank: Count
    attempt: Count


class RenewMembers(msgspec.Struct, frozen=True, array_like=True, tag="renew_members"):
    """The ranks of a membership cannot reach each other although none is lost: they connect anew.

    Only the first such report about a membership counts. A rank that the master does not count joins with it.
    """

    round: Count
    rank: Count
    attempt: Count
    number: Count


class DivideMembers(msgspec.Struct, frozen=True, array_like=True, tag="divide_members"):
    """Each replica is spread over a row of ``row`` ranks. Each rank of the world reports it; the first report counts."""

    round: Count
    rank: Count
    attempt: Count
    row: Workers


class LeaveMembers(msgspec.Struct, frozen=True, array_like=True, tag="leave_members"):
    """A rank has asked to join and cannot yet: the others are within a step. Its row joins when it asks again."""

    round: Count
    rank: Count
    attempt: Count


class FinishMembers(msgspec.Struct, frozen=True, array_like=True, tag="finish_members"):
    """A rank has finished the training."""

    round: Count
    rank: Count
    attempt: Count


class Meet(msgspec.Struct, frozen=True, array_like=True, tag="meet"):
    """Set keys by which the ranks of a membership connect to each other, each once, and read those of the others.

    The keys are in the memory of one master only: a reply has its epoch, and who sees another epoch sets its keys
    again, and reads from the beginning.
    """

    round: Count
    number: Count
    ranks: Count
    """Checksum of the membership's ranks: a master that has lost its journal may give its number to another one."""
    put: Annotated[dict[_Key, bytes], msgspec.Meta(max_length=MAX_KEYS)] = {}
    after: Count = 0
    """Number of keys that the rank has read: it gets the next ones, in the order in which they were set."""
    row: KnownCount = -1
    """Row whose ranks connect to each other, by its place in the world; ``number`` is their attempt. -1: all ranks do."""
    begun: bool = False
    """True for keys of the whole round, which ranks set once it has begun; ``number`` and ``ranks`` are 0."""


class LookMembers(msgspec.Struct, frozen=True, array_like=True, tag="look_members"):
    """Ask for the current membership."""

    round: Count


class Met(msgspec.Struct, frozen=True, array_like=True, tag="met"):
    """The answer to `Meet`: the keys after those that the rank has, as many as a message takes."""

    epoch: int
    values: dict[str, bytes] = {}
    refused: str = ""
    """Why the keys were not set; empty if they were."""


class MembersNow(msgspec.Struct, frozen=True, array_like=True, tag="members_now"):
    """The answer to the other requests: the current membership; None if its round is over."""

    members: Members | None


MembershipChange: TypeAlias = (
    JoinMembers | LeaveMembers | RenewMembers | DivideMembers | FinishMembers
)
MembershipRequest: TypeAlias = MembershipChange | Meet | LookMembers
MembershipReply: TypeAlias = Met | MembersNow
