"""The strategy of a world whose size changes: planned for the sizes around it, chosen by the job's master.

Outside of a job of `dlrover-run`, every rank plans for itself.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from dlrover import config, launched
from dlrover._util import backoff
from dlrover.accelerate import strategies
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.planning.parallel.records import Strategy
from dlrover.rpc.relayed import RelayedMaster
from dlrover.spec.requests import Unanswered
from dlrover.spec.requests.strategies import (
    ChooseStrategy,
    OfferLadder,
    SizedStrategy,
    StrategyReply,
    StrategyRequest,
)

_log = logging.getLogger(__name__)

LAYOUTS = 4
"""Strategies offered for each size, each with other degrees of tensor, pipeline, context and expert parallelism."""
SIZES = 16
"""Numbers of nodes for which strategies are offered, around the present one."""
MASTER_WAIT = 60.0
"""Seconds to wait for a master that is away; the rank then plans for itself."""
RETRY = 0.05, 1.0
"""Seconds until the first retry, and between later ones."""

Planner = Callable[[int], Iterator[tuple[Strategy, float]]]
"""Yields the strategies for a number of ranks, with their seconds per step, the fastest first."""


def key(*facts: Any) -> str:
    """Return what identifies a ladder: a digest of all that its strategies depend on."""
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def agreed(key: str, plan: Planner, ranks: int, per_node: int, state_bytes: int) -> Strategy | None:
    """Return the strategy of this round, on which all ranks agree; None if none fits.

    Args:
        key: Identifies the model, the batch and the options.
        plan: The planner.
        ranks: Ranks of this world.
        per_node: Ranks of each node.
        state_bytes: Bytes of the parameters and the optimizer's state, on all ranks together.
    """
    if not launched.given.relay:
        return next((one for one, _ in plan(ranks)), None)
    master = RelayedMaster(launched.given.relay)
    try:
        reply = _ask(master, ChooseStrategy(key, launched.given.round, ranks))
        if reply.strategy:
            _log.info("The job's master has chosen the strategy: %s.", reply.reason)
            return strategies.load(reply.strategy.encode(), ranks)
        own = _rungs(plan, ranks)
        if not own:
            return None
        if config.environ().get("RANK", "0") == "0":
            others = [_rungs(plan, size) for size in _sizes(ranks, per_node)]
            rungs = tuple(itertools.chain(own, *others))
            _ask(master, OfferLadder(key, launched.given.round, own[0], rungs, state_bytes))
        return strategies.load(own[0].strategy.encode(), ranks)
    except InfrastructureError as error:
        _log.warning("This rank plans its strategy alone: %s", error)
        return next((one for one, _ in plan(ranks)), None)
    finally:
        master.close()


def _sizes(ranks: int, per_node: int) -> list[int]:
    """Return other numbers of ranks that the world may have: half as many nodes to twice as many, the nearest first."""
    nodes = max(1, ranks // per_node)
    others = [each for each in range(max(1, nodes // 2), 2 * nodes + 1) if each * per_node != ranks]
    nearest = sorted(others, key=lambda each: (abs(each - nodes), each))
    return [each * per_node for each in nearest[:SIZES]]


def _rungs(plan: Planner, ranks: int) -> list[SizedStrategy]:
    """Return the fastest strategies for a number of ranks; none if nothing fits."""
    return [
        SizedStrategy(ranks, one.degrees, msgspec.json.encode(one).decode(), in_words(one), seconds)
        for one, seconds in itertools.islice(plan(ranks), LAYOUTS)
    ]


def in_words(one: Strategy) -> str:
    """Return a strategy as its degrees: ``dp_shard 4 x tp 2``."""
    names = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
    return " x ".join(f"{n} {getattr(one, n)}" for n in names if getattr(one, n) > 1) or "one rank"


def _ask(master: RelayedMaster, request: StrategyRequest) -> StrategyReply:
    """Return the master's answer; wait for a master that is away.

    Raises:
        ConfigurationError: the request was refused.
        InfrastructureError: no master answered in time.
    """
    until = time.monotonic() + MASTER_WAIT
    for delay in backoff.delays(*RETRY):
        reply = master.ask(request)
        if isinstance(reply, StrategyReply):
            return reply
        if not isinstance(reply, Unanswered) or reply.refused:
            refused = getattr(reply, "refused", "") or "the answer is not about strategies"
            raise ConfigurationError(f"The job's master refuses the strategy: {refused}")
        if time.monotonic() > until:
            raise InfrastructureError(reply.away)
        threading.Event().wait(delay)
    raise InfrastructureError("No master answered.")
