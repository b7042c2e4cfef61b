"""Results of node checks on simulated nodes."""

from __future__ import annotations

import enum
import random
from collections.abc import Collection

from dlrover.spec.check import CheckOrder, CheckReport, Component, ProbeResult, ProbeState

SLOWER = 3.0
"""Factor by which a slow part or network is slower."""
SCATTER = 1.2
"""Ratio of the fastest to the slowest healthy part or network."""


class Ailment(enum.Enum):
    """What is wrong with a node."""

    NOTHING = "nothing"
    DEVICE = "device"
    """The device fails, and the check finds it; training goes on."""
    NETWORK = "network"
    """The node reaches no other node."""
    SLOW_DEVICE = "slow device"
    SLOW_NETWORK = "slow network"


def report(
    order: CheckOrder,
    own: Ailment,
    others: Collection[Ailment | None],
    chance: random.Random,
    now: float,
) -> CheckReport:
    """Return a node's answer to an order; ``others`` are its group's other nodes, None for a dead one."""
    results = []
    if order.local:
        results.append(_device(own, chance))
    if others:
        results.append(_network({own, *others}, chance))
    return CheckReport(
        check=order.check, round=order.round, results=tuple(results), received_at=now, sent_at=now
    )


def fails(own: Ailment, others: Collection[Ailment | None]) -> bool:
    """Return True if the network of a group fails."""
    return bool({own, *others} & {Ailment.NETWORK, None}) and bool(others)


def _device(own: Ailment, chance: random.Random) -> ProbeResult:
    if own is Ailment.DEVICE:
        failed = ProbeState.FAILED
        return ProbeResult(component=Component.DEVICE, state=failed, message="simulated fault")
    speed = chance.uniform(1.0, SCATTER) / (SLOWER if own is Ailment.SLOW_DEVICE else 1.0)
    return ProbeResult(component=Component.DEVICE, figure=1000 * speed, unit="GFLOP/s")


def _network(group: Collection[Ailment | None], chance: random.Random) -> ProbeResult:
    if Ailment.NETWORK in group or None in group:
        failed = ProbeState.FAILED
        return ProbeResult(component=Component.NETWORK, state=failed, message="simulated time-out")
    time = chance.uniform(1.0, SCATTER) * (SLOWER if Ailment.SLOW_NETWORK in group else 1.0)
    return ProbeResult(component=Component.NETWORK, figure=time, unit="ms")
