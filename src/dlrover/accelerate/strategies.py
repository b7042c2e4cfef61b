"""Strategies as files, as JSON, and as lists of methods in the original's form."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import msgspec

from dlrover.accelerate.methods import of_methods
from dlrover.errors import ConfigurationError
from dlrover.planning.parallel.records import Strategy

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
        raise ConfigurationError(
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
        return msgspec.convert(values, Strategy)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{source} is not the JSON of a Strategy: {error}.") from error


def _refuse_unknown(values: Mapping[Any, Any], source: str) -> None:
    known = [field.name for field in fields(Strategy)]
    for name in values:
        if name not in known:
            raise ConfigurationError(
                f"{source} has the field {name!r}; accepted are {', '.join(known)}."
            )
