"""The parallel strategy of each round, chosen from the ladder of strategies that the program has offered.

A world of another size can keep its tensor, pipeline, context and expert parallelism and change its data parallelism
only, or take another layout. The layout with the least time for the rest of the training is chosen, including the time
to move the state; another layout must win by `HYSTERESIS`, since predictions err.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from dlrover.errors import ProtocolError
from dlrover.spec.events import StrategyChosen
from dlrover.spec.requests.strategies import (
    MAX_LADDERS,
    MAX_RUNGS,
    ChooseStrategy,
    OfferLadder,
    SizedStrategy,
    StrategyReply,
    StrategyRequest,
)

HYSTERESIS = 1.05
"""Factor by which another layout must be faster than the present one."""
HORIZON = 3600.0
"""Seconds that a training is taken to last if it does not say how many steps are left."""
BANDWIDTH = 1e9
"""Bytes per second at which each rank loads its part of the state under another layout."""


@dataclass
class Chosen:
    """The strategy of one round."""

    round: int
    rung: SizedStrategy
    reason: str


@dataclass
class Strategies:
    """The ladders of one job, and what was chosen from them. Only `handle` changes it."""

    #: the latest ladder of each key; the oldest is dropped
    ladders: dict[str, OfferLadder] = field(default_factory=dict)
    #: the latest choice of each key
    chosen: dict[str, Chosen] = field(default_factory=dict)

    def has_chosen(self, request: ChooseStrategy) -> bool:
        """Return whether the answer is known, so that the request changes nothing."""
        known = self.chosen.get(request.key)
        return known is not None and known.round >= request.round

    def handle(self, request: StrategyRequest) -> tuple[StrategyReply, StrategyChosen | None]:
        """Handle a request; return the answer and, if a round gets a strategy, the event.

        Raises:
            ProtocolError: the chosen strategy has another number of ranks than the round's.
        """
        match request:
            case OfferLadder():
                return StrategyReply(), self._offered(request)
            case ChooseStrategy():
                return self._choose(request)

    def _offered(self, offer: OfferLadder) -> StrategyChosen | None:
        known = self.chosen.get(offer.key)
        if known is not None and known.round > offer.round:
            return None  # it is late: a later round has a strategy
        merged = self.ladders.pop(offer.key, None)
        sizes = {rung.ranks for rung in offer.rungs}
        kept = [rung for rung in merged.rungs if rung.ranks not in sizes] if merged else []
        room = MAX_RUNGS - len(offer.rungs)
        self.ladders[offer.key] = msgspec.structs.replace(offer, rungs=(*offer.rungs, *kept[:room]))
        while len(self.ladders) > MAX_LADDERS:
            oldest = next(iter(self.ladders))
            del self.ladders[oldest]
            self.chosen.pop(oldest, None)
        if known is not None and known.round == offer.round:
            return None  # said again, after an answer was lost
        reason = "it is the fastest that fits, as predicted"
        return self._take(offer.key, Chosen(offer.round, offer.chosen, reason))

    def _choose(self, request: ChooseStrategy) -> tuple[StrategyReply, StrategyChosen | None]:
        known, event = self.chosen.get(request.key), None
        ladder = self.ladders.get(request.key)
        if known is None or known.round < request.round:
            rung, reason = pick(ladder, known.rung if known else None, request)
            if rung is None:
                return StrategyReply(reason=reason), None
            known = Chosen(request.round, rung, reason)
            event = self._take(request.key, known)
        elif known.round > request.round:
            raise ProtocolError(
                f"Round {request.round} is over; round {known.round} has a strategy."
            )
        if known.rung.ranks != request.ranks:
            raise ProtocolError(
                f"Round {request.round} has a strategy for {known.rung.ranks} ranks, not {request.ranks}."
            )
        return StrategyReply(strategy=known.rung.strategy, reason=known.reason), event

    def _take(self, key: str, choice: Chosen) -> StrategyChosen:
        self.chosen[key] = choice
        rung = choice.rung
        return StrategyChosen(choice.round, rung.ranks, rung.name, rung.step_seconds, choice.reason)

    def validate(self) -> None:
        """Check the invariants; raise AssertionError on the first broken one."""
        assert len(self.ladders) <= MAX_LADDERS
        assert self.chosen.keys() == self.ladders.keys()


def pick(
    ladder: OfferLadder | None, before: SizedStrategy | None, request: ChooseStrategy
) -> tuple[SizedStrategy | None, str]:
    """Return the strategy for a round, and why; None if the ladder has none for its size.

    Args:
        ladder: The strategies; None if none were offered.
        before: What the round before trained with; None if unknown.
        request: The round.
    """
    rungs = [rung for rung in ladder.rungs if rung.ranks == request.ranks] if ladder else []
    if not rungs or ladder is None:
        return None, f"No strategy for {request.ranks} ranks is known yet."
    best = min(rungs, key=lambda rung: rung.step_seconds)
    same = next((rung for rung in rungs if before and rung.degrees == before.degrees), None)
    if before is None:
        return best, "it is the fastest that fits, as predicted"
    if same is None:
        return best, f"{before.name} does not fit {request.ranks} ranks"
    if same is best:
        return same, "the layout stays the fastest"
    left = request.seconds_left if request.seconds_left is not None else HORIZON
    moved = ladder.state_bytes / (request.ranks * BANDWIDTH)
    there = left * best.step_seconds / max(same.step_seconds, 1e-9) + moved
    faster = same.step_seconds / max(best.step_seconds, 1e-9) - 1
    if left >= there * HYSTERESIS:
        return best, f"a step is {faster:.0%} faster than with {same.name}"
    return same, (
        f"{best.name} is only {faster:.0%} faster, and moving the state takes {moved:.1f} s"
        f" of {left:.0f} s"
    )
