"""Megatron-core's sharded states, as parts of tensors and as objects, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica

from dlrover.checkpoint.engine.tree import Shard
from dlrover.checkpoint.loading.plan import Target
from dlrover.checkpoint.machine.extent import Extent
from dlrover.errors import ConfigurationError
from dlrover.integrations import objects
from dlrover.integrations.named import Saved


def parts_and_objects(state: Any) -> tuple[list[tuple[str, Shard]], dict[str, Any]]:
    """Return what this rank saves: of replicas, only the main one.

    Raises:
        ConfigurationError: an object cannot be pickled.
    """
    parts: list[tuple[str, Shard]] = []
    found: dict[str, Any] = {}
    for item in nested_values(state):
        if not is_main_replica(item.replica_id):
            continue
        if isinstance(item, ShardedObject):
            found[item.unique_key] = objects.pickled(item.data, (item.key,))
        else:
            whole, at = tuple(item.global_shape), tuple(item.global_offset)
            parts.append((item.key, Shard(_data(item), whole, at)))
    return parts, found


def _data(item: Any) -> torch.Tensor:
    """Return the tensor, with as many dimensions as the whole one has."""
    return item.data.detach()[(None,) * item.prepend_axis_num]


def targets(saved: Saved, state: Any) -> list[Target]:
    """Return the parts of a step that the tensors of a state need.

    Raises:
        ConfigurationError: something was not saved, or has another shape.
    """
    found: list[Target] = []
    for item in nested_values(state):
        is_object = isinstance(item, ShardedObject)
        if (item.unique_key if is_object else item.key) not in (
            saved.objects if is_object else saved.parts
        ):
            raise ConfigurationError(f"{item.key} is not in the checkpoint.")
        if not is_object:
            found += _targets(saved, item)
    return found


def _targets(saved: Saved, item: Any) -> Iterator[Target]:
    whole = saved.whole(item.key)
    fits = whole == tuple(item.global_shape)
    if not fits and not item.allow_shape_mismatch:
        raise ConfigurationError(
            f"{item.key} has the shape {list(whole)} in the checkpoint; in the model it has"
            f" {list(item.global_shape)}."
        )
    item.init_data("cpu")
    data, at = _data(item), tuple(item.global_offset)
    if not fits:
        data.zero_()  # padding, which the checkpoint may lack
    ends = [min(a + n, size) for a, n, size in zip(at, data.shape, whole, strict=True)]
    shape = tuple(max(0, end - a) for a, end in zip(at, ends, strict=True))
    return saved.targets(item.key, Extent(whole, at, shape), data[tuple(map(slice, shape))])


def filled(saved: Saved, state: Any, *, trusted: bool) -> Any:
    """Return the state with its loaded tensors and its objects."""

    def fill(item: Any) -> Any:
        if isinstance(item, ShardedObject):
            return objects.unpickled(saved.objects[item.unique_key], trusted=trusted)
        return item.data

    return dict_list_map_outplace(fill, state)


def described_tensors(saved: Saved) -> dict[str, Any]:
    """Return the tensors of a step, without content."""
    found = {}
    for name in saved.parts:
        hollow = torch.empty(saved.whole(name), dtype=saved.dtype(name), device="meta")
        found[name] = ShardedTensor.from_rank_offsets(name, hollow).without_data()
    return found


def described_objects(names: Iterable[str]) -> dict[str, Any]:
    """Return objects by name, without content."""
    return {name: ShardedObject.empty_from_unique_key(name) for name in names}
