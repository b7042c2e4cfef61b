"""Strategies as files, as JSON, and as lists of methods in the original's form; what one needs of a model."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dlrover._util import decoding
from dlrover.accelerate.methods import of_methods
from dlrover.errors import ConfigurationError, kind_of
from dlrover.planning.parallel.records import Strategy
from dlrover.planning.parallel.stages import stages

if TYPE_CHECKING:
    from dlrover.accelerate.anatomy import Anatomy

ACCEPTED = "a path, JSON as bytes, a Strategy, or a list of names and (name, config)"
PICKLE = b"\x80"
"""First byte of a pickle of protocol 2 or later."""


def save(strategy: Strategy, path: str | os.PathLike[str]) -> None:
    """Write a strategy as JSON."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(strategy)) + b"\n")


def load(given: object, world_size: int, batch: int = 0) -> Strategy:
    """Return the strategy that ``given`` describes, for ``world_size`` ranks.

    Args:
        given: a path, JSON, a `Strategy`, or a list of methods such as
            ``["fsdp", ("amp_native", {"dtype": "bf16"})]``.
        world_size: number of ranks; the data-parallel degrees are rescaled to it.
        batch: samples of a global batch, for lists that say nothing about micro-batches.

    Raises:
        ConfigurationError: the value describes no strategy, or one that does not fit ``world_size``.
    """
    match given:
        case Strategy():
            found = given
        case bytes() | bytearray():
            found = _of_json(bytes(given), "load_strategy")
        case str() | os.PathLike():
            found = _of_json(_read(Path(given)), f"load_strategy {os.fspath(given)!r}")
        case Sequence():
            return of_methods(given, world_size, batch)
        case _:
            raise ConfigurationError(
                f"load_strategy is a {type(given).__name__}; accepted are {ACCEPTED}."
            )
    return fit(found, world_size)


def fit(strategy: Strategy, world_size: int) -> Strategy:
    """Return the strategy with its data-parallel degrees rescaled to a number of ranks.

    Copies are kept as far as they divide the ranks that remain for data.

    Raises:
        ConfigurationError: the other degrees do not divide the number of ranks.
    """
    if strategy.size == world_size:
        return strategy
    fixed = strategy.tp * strategy.pp * strategy.cp
    if world_size % fixed:
        raise ConfigurationError(
            f"tp x pp x cp is {strategy.tp} x {strategy.pp} x {strategy.cp};"
            f" it must divide the {world_size} ranks of this world."
        )
    ranks = world_size // fixed
    if strategy.dp_shard == 1:
        return replace(strategy, dp_replicate=ranks)
    copies = strategy.dp_replicate if ranks % strategy.dp_replicate == 0 else 1
    return replace(strategy, dp_replicate=copies, dp_shard=ranks // copies)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise kind_of(error)(
            f"load_strategy is {str(path)!r}, which cannot be read ({error.strerror}); accepted are {ACCEPTED}."
        ) from error


def _of_json(data: bytes, source: str) -> Strategy:
    if data.startswith(PICKLE):
        raise ConfigurationError(
            f"{source} is a pickle, which could execute code; accepted is the JSON that"
            " save_strategy_to_file writes."
        )
    try:
        values = msgspec.json.decode(data)
        if not isinstance(values, Mapping):
            raise msgspec.ValidationError(f"it is a {type(values).__name__}, not an object")
        _refuse_unknown(values, source)
        return decoding.convert(values, Strategy)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigurationError(f"{source} is not the JSON of a Strategy: {error}.") from error


def _refuse_unknown(values: Mapping[Any, Any], source: str) -> None:
    known = [field.name for field in fields(Strategy)]
    for name in values:
        if name not in known:
            raise ConfigurationError(
                f"{source} has the field {name!r}; accepted are {', '.join(known)}."
            )


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
    if one.precision == "fp8":
        yield "precision is 'fp8'; accepted are 'fp32', 'bf16' and 'fp16', because products in fp8 are only planned"
    for name in one.blocks:
        if name not in anatomy.classes:
            yield f"blocks has {name!r}; accepted are classes of modules that the model has"
    yield from _tensor(one, anatomy)
    yield from _pipeline(one, anatomy)
    yield from _context(one, anatomy)
    yield from _experts(one, anatomy)
    yield from _sharding(one, anatomy)
    for name, degree in (("tp", one.tp), ("cp", one.cp)):
        if degree > 1 and anatomy.again:
            yield (
                f"{name} is {degree}; accepted is 1, because the block {anatomy.again!r} of the model"
                " is an earlier one once more"
            )


def _sharding(one: Strategy, anatomy: Anatomy) -> Iterator[str]:
    alone = one.tp == one.pp == one.ep == 1
    if not (one.offload or one.dp_shard * one.cp > 1 or (one.dp > 1 and not alone)):
        return
    if anatomy.scalar:
        yield (
            f"the parameter {anatomy.scalar!r} of the model has no dimension, and PyTorch shards none such; give it one"
            " element in one dimension, or train with dp_replicate alone"
        )
    for unit, dtypes in _types(anatomy).items() if not one.blocks else ():
        if len(dtypes) > 1:
            yield (
                f"the parameters of {unit or 'the model, without its blocks,'} have the types"
                f" {' and '.join(sorted(map(str, dtypes)))}, and PyTorch shards one type at once; convert them, or train with"
                " dp_replicate alone"
            )
    if anatomy.across:
        yield (
            f"the parameter {anatomy.across!r} of the model is in several blocks, or in one and outside of it, and PyTorch"
            " shards none such; train with dp_replicate alone"
        )


def _types(anatomy: Anatomy) -> dict[str, set[Any]]:
    """Return the types of the trained parameters of each unit that is sharded."""
    units = [*anatomy.experts, *anatomy.blocks]
    found: dict[str, set[Any]] = {}
    for name in anatomy.trained:
        unit = next((each for each in units if name.startswith(f"{each}.")), "")
        if name in anatomy.shapes:
            found.setdefault(unit, set()).add(anatomy.shapes[name][1])
    return found


def _tensor(one: Strategy, anatomy: Anatomy) -> Iterator[str]:
    for name, count in (("attention", anatomy.heads), ("key-value", anatomy.kv_heads)):
        if count % one.tp:
            yield f"tp is {one.tp}; accepted are divisors of the model's {count} {name} heads"
    if one.tp > 1 and anatomy.shared and not anatomy.again:
        yield f"tp is {one.tp}; accepted is 1, because the parameter {anatomy.shared!r} has another name, too"
    if one.tp > 1 and not anatomy.blocks:
        yield f"tp is {one.tp}; accepted is 1, because the model has no list of equal blocks"


def _pipeline(one: Strategy, anatomy: Anatomy) -> Iterator[str]:
    parts, layers = one.pp * one.virtual, len(anatomy.blocks)
    if one.pp > 1 and parts > layers:
        yield (
            f"pp x virtual is {one.pp} x {one.virtual}; it must be at most {layers},"
            " the number of the model's equal blocks"
        )
    if one.pp > 1 and anatomy.loose:
        yield (
            f"pp is {one.pp}; accepted is 1, because of {anatomy.loose[0]!r}: outside of the blocks, a pipeline takes"
            " embeddings, Linear layers and norms only"
        )
    if one.pp > 1 and anatomy.router_loss:
        yield (
            f"pp is {one.pp}; accepted is 1, because output_router_logits is True in the model's configuration,"
            " and the loss of the routers is that of all blocks"
        )
    for group in anatomy.tied if one.pp > 1 and parts <= layers else ():
        if len(found := stages_of(group, one, anatomy)) > 1 and found != {0, one.pp - 1}:
            yield (
                f"pp is {one.pp}; accepted is 1, because {group[0]!r} and {group[-1]!r} are one parameter; in a pipeline,"
                " one stage has both, or the first and the last"
            )
    if one.pp == 1 and one.virtual > 1:
        yield f"virtual is {one.virtual}; accepted is 1 without pp"
    interleaved = one.schedule == "interleaved_1f1b"
    if one.schedule and interleaved != (one.virtual > 1):
        needed = "'interleaved_1f1b'" if one.virtual > 1 else "'gpipe' or '1f1b'"
        yield f"schedule is {one.schedule!r}; accepted with virtual {one.virtual} is {needed}"


def divide(anatomy: Anatomy, one: Strategy) -> list[range]:
    """Return the blocks of each part of a pipeline."""
    parts, layers = one.pp * one.virtual, len(anatomy.blocks)
    shape = anatomy.transformer
    if shape is not None and shape.layers == layers:
        sizes: Sequence[int] = stages(shape, one.pp, one.virtual).chunks
    else:
        sizes = [layers // parts + (part < layers % parts) for part in range(parts)]
    ends = itertools.accumulate(sizes)
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def stages_of(names: Iterable[str], one: Strategy, anatomy: Anatomy) -> set[int]:
    """Return the stages of a pipeline that have these parameters."""
    runs, found = divide(anatomy, one), set()
    for name in names:
        block = next((number for number, each in enumerate(anatomy.blocks) if name.startswith(f"{each}.")), -1)  # fmt: skip
        if block >= 0:
            found.add(next(part for part, run in enumerate(runs) if block in run) % one.pp)
        else:
            first = any(name.startswith(f"{each}.") for each in anatomy.before)
            found.add(0 if first else one.pp - 1)
    return found


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
