"""Messages about parallel strategies for the sizes that a job's world may take, between workers and their master."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

MAX_RUNGS = 1000
"""Maximum number of strategies in a ladder."""
MAX_STRATEGY = 10_000
"""Maximum characters of a strategy's JSON."""
MAX_LADDERS = 16
"""Maximum number of ladders that a master keeps: one for each model, batch and set of options."""

_Number = Annotated[int, msgspec.Meta(ge=0)]
_Key = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class SizedStrategy(msgspec.Struct, frozen=True, array_like=True):
    """One strategy for a world of one size."""

    ranks: Annotated[int, msgspec.Meta(ge=1)]
    degrees: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=8)]
    """Degrees of tensor, pipeline, context and expert parallelism: strategies that share them differ in data parallelism."""
    strategy: Annotated[str, msgspec.Meta(max_length=MAX_STRATEGY)]
    """JSON object."""
    name: Annotated[str, msgspec.Meta(max_length=200)]
    """The strategy in words."""
    step_seconds: _Seconds
    """Predicted duration of a step."""


class OfferLadder(msgspec.Struct, frozen=True, array_like=True, tag="ladder"):
    """The fastest strategies that a program can train with, for the sizes around its present one."""

    key: _Key
    """Identifies the model, the batch and the options that the ladder is for."""
    round: _Number
    chosen: SizedStrategy
    """The one that the round of the offer trains with."""
    rungs: Annotated[tuple[SizedStrategy, ...], msgspec.Meta(max_length=MAX_RUNGS)]
    state_bytes: _Number
    """Bytes of the parameters and the optimizer's state, on all ranks together."""


class ChooseStrategy(msgspec.Struct, frozen=True, array_like=True, tag="choose_strategy"):
    """Request for the strategy of a round; each rank makes it and gets the same answer."""

    key: _Key
    round: _Number
    ranks: Annotated[int, msgspec.Meta(ge=1)]
    seconds_left: float | None = None
    """Seconds until the training completes all its steps; the master fills it in. None: unknown."""


StrategyRequest: TypeAlias = OfferLadder | ChooseStrategy


class StrategyReply(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="strategy"):
    """The answer to each request."""

    strategy: str = ""
    """JSON object; empty if no ladder has a strategy for this size: the program plans one."""
    reason: str = ""
    """Why this strategy was chosen, as a sentence."""
