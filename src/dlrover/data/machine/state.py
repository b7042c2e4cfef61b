"""Part of a checkpoint about a dataset: which samples the model has learned from.

Each rank stores what all ranks began with, and what it has handed to the training itself since then. The
union is the set of samples whose effect the model has, so any number of ranks can continue from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from dlrover._util import decoding
from dlrover.data.machine.spans import Spans
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.spec.requests.shards import DataSpec, Incarnation

NO_READER = -1
"""Rank of a parameter server, whose part is empty: it reads no data."""


class RankData(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank's part."""

    version: Literal[1] = 1
    name: str
    size: int
    order: str
    rank: int
    world_size: int
    epoch: int
    """The current or next epoch."""
    base: bytes
    """Samples that all ranks began with (packed `Spans`)."""
    acknowledged: bytes
    """Samples that this rank has handed to the training since, without those that are settled (packed `Spans`)."""
    settled: bytes = b""
    """Samples of all ranks in a stored checkpoint of the same incarnation (packed `Spans`)."""
    incarnation: Incarnation | None = None
    """Incarnation of the readers that handed them out; None if this rank had not begun to read."""
    begins: tuple[int, ...] = ()
    """For a stream: where each partition began for this job."""
    limits: tuple[int, ...] = ()
    """For a stream that ends: where each partition ends for this job."""
    source_ids: dict[str, str] = {}
    """For a stream: what tells its topics from ones that are created later, as in `DataSpec`."""
    samples_before: int = 0
    """For a stream: samples that all ranks together had handed to the training before they began."""
    samples: int = 0
    """For a stream: samples that this rank has handed to the training since."""

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        plain: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,))
        return plain


def merged(states: Sequence[Mapping[str, Any]], spec: DataSpec) -> tuple[Spans, int]:
    """Return the samples that all ranks together have learned from, and the epoch to continue with.

    Raises:
        ConfigurationError: ranks' parts are missing, or belong to another dataset.
        InfrastructureError: the parts contradict each other.
    """
    parts = [part for part in map(_decoded, states) if part.rank != NO_READER]
    if not parts:
        raise ConfigurationError(f"No worker has saved its part of the data set {spec.name}.")
    first = parts[0]
    ranks = sorted(part.rank for part in parts)
    if ranks != list(range(first.world_size)):
        raise ConfigurationError(
            f"The data set {first.name} was saved by {first.world_size} ranks, and the state of"
            f" {len(parts)} of them is given; a Checkpointer restores them all."
        )
    for field in ("name", "size", "order"):
        saved, now = getattr(first, field), getattr(spec, field)
        if saved != now:
            raise ConfigurationError(
                f"The data set has {field} {now!r}; in the checkpoint it has {saved!r}."
            )
    if any(part.base != first.base for part in parts):
        raise InfrastructureError(
            f"The ranks of this checkpoint began with different samples of the data set {first.name}."
        )
    return _united(parts), min(part.epoch for part in parts)


def _united(parts: Sequence[RankData]) -> Spans:
    first = parts[0]
    acknowledged = Spans.unpacked(first.base)
    for part in parts:
        for span in Spans.unpacked(part.acknowledged):
            if acknowledged.meets(span):
                raise InfrastructureError(
                    f"Two ranks of this checkpoint have learned from samples {span.start} to {span.stop} of"
                    f" partition {span.partition} of the data set {first.name}."
                )
            acknowledged.add(span)
    for settled in {part.settled for part in parts}:
        for span in Spans.unpacked(settled):
            acknowledged.add(span)
    return acknowledged


def began(states: Sequence[Mapping[str, Any]]) -> RankData:
    """Return a part that has what workers found in a stream's broker, from one checkpoint's states."""
    parts = map(_decoded, states)
    return max(parts, key=lambda part: (len(part.begins), part.incarnation is not None))


def began_as(states: Sequence[Mapping[str, Any]]) -> set[Incarnation]:
    """Return the incarnations of the readers of one checkpoint's states."""
    return {part.incarnation for part in map(_decoded, states) if part.incarnation is not None}


def count(states: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of a stream's samples handed to the training, from one checkpoint's states."""
    parts = [_decoded(state) for state in states]
    return parts[0].samples_before + sum(part.samples for part in parts)


def _decoded(state: Mapping[str, Any]) -> RankData:
    try:
        return decoding.convert(state, RankData)
    except msgspec.ValidationError as error:
        raise ConfigurationError(
            f"The checkpoint holds no state of a data set here: {error}."
        ) from error
