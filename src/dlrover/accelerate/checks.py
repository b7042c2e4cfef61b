"""What a strategy needs of a model and of the world: checked before any process group is built."""

from __future__ import annotations

from collections.abc import Iterator

from dlrover.accelerate.anatomy import Anatomy
from dlrover.errors import ConfigurationError
from dlrover.planning.parallel.records import Strategy


def check(strategy: Strategy, anatomy: Anatomy, world_size: int) -> None:
    """Check that a strategy can be applied.

    Raises:
        ConfigurationError: it cannot; the message names the field, its value and what is accepted.
    """
    for problem in _problems(strategy, anatomy, world_size):
        raise ConfigurationError(f"Strategy: {problem}.")


def _problems(one: Strategy, anatomy: Anatomy, world_size: int) -> Iterator[str]:
    if one.size != world_size:
        yield (
            f"dp_replicate x dp_shard x tp x pp x cp is {one.dp_replicate} x {one.dp_shard} x {one.tp} x {one.pp} x"
            f" {one.cp} = {one.size}; it must be {world_size}, the number of ranks"
        )
    if one.chunked_loss:
        yield "chunked_loss is True; accepted is False, because the program computes the loss"
    yield from _tensor(one, anatomy)
    yield from _pipeline(one, anatomy)
    yield from _context(one, anatomy)
    yield from _experts(one, anatomy)


def _tensor(one: Strategy, anatomy: Anatomy) -> Iterator[str]:
    for name, count in (("attention", anatomy.heads), ("key-value", anatomy.kv_heads)):
        if count % one.tp:
            yield f"tp is {one.tp}; accepted are divisors of the model's {count} {name} heads"
    if one.tp > 1 and not anatomy.blocks:
        yield f"tp is {one.tp}; accepted is 1, because the model has no list of equal blocks"


def _pipeline(one: Strategy, anatomy: Anatomy) -> Iterator[str]:
    parts, layers = one.pp * one.virtual, len(anatomy.blocks)
    if one.pp > 1 and parts > layers:
        yield (
            f"pp x virtual is {one.pp} x {one.virtual}; it must be at most {layers},"
            " the number of the model's equal blocks"
        )
    if one.pp == 1 and one.virtual > 1:
        yield f"virtual is {one.virtual}; accepted is 1 without pp"
    interleaved = one.schedule == "interleaved_1f1b"
    if one.schedule and interleaved != (one.virtual > 1):
        needed = "'interleaved_1f1b'" if one.virtual > 1 else "'gpipe' or '1f1b'"
        yield f"schedule is {one.schedule!r}; accepted with virtual {one.virtual} is {needed}"


def _context(one: Strategy, anatomy: Anatomy) -> Iterator[str]:
    if one.cp > 1 and not anatomy.blocks:
        yield f"cp is {one.cp}; accepted is 1, because the model has no list of equal blocks"
    heads = anatomy.heads // one.tp
    if one.cp > 1 and one.context == "ulysses" and heads % one.cp:
        yield (
            f"context is 'ulysses' with cp {one.cp}; cp must then divide the {heads} attention heads"
            " of a rank, or context must be 'all_gather'"
        )


def _experts(one: Strategy, anatomy: Anatomy) -> Iterator[str]:
    if one.ep == 1:
        return
    if not anatomy.experts:
        yield f"ep is {one.ep}; accepted is 1, because the model has no experts"
    elif anatomy.expert_count % one.ep:
        yield f"ep is {one.ep}; accepted are divisors of the model's {anatomy.expert_count} experts"
    elif (one.dp * one.cp * one.tp) % one.ep:
        yield (
            f"ep is {one.ep}; it must divide dp x cp x tp, which is {one.dp} x {one.cp} x {one.tp}"
        )


def expert_ranks(one: Strategy, anatomy: Anatomy) -> int:
    """Return over how many ranks the experts are dealt: over those of tp, too, where their number allows."""
    over_data = one.dp * one.cp % one.ep == 0
    if one.tp > 1 and over_data and anatomy.expert_count and not anatomy.expert_count % (one.ep * one.tp):  # fmt: skip
        return one.ep * one.tp
    return one.ep
