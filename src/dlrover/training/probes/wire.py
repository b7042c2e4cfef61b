"""The messages between a check process and its parent: frames of MessagePack (`dlrover._util.framing`)."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dlrover.spec.check import CheckOrder, Component, ProbeResult


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Request: carry out an order for the node ``node``."""

    order: CheckOrder
    node: int


class ShareValue(msgspec.Struct, frozen=True, tag="share"):
    """Request: share ``value`` with the job's other ranks and return all ranks' values.

    A rank without a value within ``seconds`` counts as the empty text.
    """

    topic: str
    value: str
    seconds: float


Request: TypeAlias = Probe | ShareValue


class Began(msgspec.Struct, frozen=True, tag="began"):
    """Reply: the check of a component begins and takes at most ``seconds``."""

    component: Component
    seconds: float


class ProbeReply(msgspec.Struct, frozen=True, tag="found"):
    """Reply: the result of a probe."""

    result: ProbeResult


class SharedValues(msgspec.Struct, frozen=True, tag="shared"):
    """Reply: the values of all ranks, by rank."""

    values: tuple[str, ...]


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Reply: the request is done."""


class ProbeProblem(msgspec.Struct, frozen=True, tag="problem"):
    """Reply: the request failed."""

    message: str


Reply: TypeAlias = Began | ProbeReply | SharedValues | Finished | ProbeProblem
