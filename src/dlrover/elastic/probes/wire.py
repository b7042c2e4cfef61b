"""What passes between a check process and the process that started it: one JSON value a line."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from dlrover.spec.check import CheckOrder, Component, ProbeResult


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """To the check process: carry out an order for the node ``node``."""

    order: CheckOrder
    node: int


class Share(msgspec.Struct, frozen=True, tag="share"):
    """To the check process: give the job's other ranks ``value``, get what each of them gave.

    Ranks that gave nothing within ``seconds`` give the empty text.
    """

    topic: str
    value: str
    seconds: float


Request: TypeAlias = Probe | Share


class Began(msgspec.Struct, frozen=True, tag="began"):
    """From the check process: it now checks this component, for at most ``seconds``."""

    component: Component
    seconds: float


class Found(msgspec.Struct, frozen=True, tag="found"):
    """From the check process: what came of a probe."""

    result: ProbeResult


class Shared(msgspec.Struct, frozen=True, tag="shared"):
    """From the check process: what all ranks gave, by rank."""

    values: tuple[str, ...]


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """From the check process: the request has been carried out."""


class Problem(msgspec.Struct, frozen=True, tag="problem"):
    """From the check process: the request cannot be carried out."""

    message: str


Reply: TypeAlias = Began | Found | Shared | Finished | Problem
