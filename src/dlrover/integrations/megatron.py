"""Megatron-core's ``dist_checkpointing.save`` and ``load`` through memory.

::

    dist_checkpointing.save(state, directory, sharded_strategy=FlashSave(checkpointer, step))
    flash = FlashLoad(checkpointer)
    dist_checkpointing.load(state, flash.newest(), sharded_strategy=flash, common_strategy=flash)

Megatron itself writes two small files to the directory, ``common.pt`` and ``metadata.json``. The content of
``common.pt`` is saved with the rest and loaded from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    maybe_load_config,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies import base
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME

from dlrover.checkpoint.engine.checkpointer import Checkpointer, LoadRecord
from dlrover.checkpoint.engine.tree import Shard
from dlrover.checkpoint.loading.plan import Target
from dlrover.checkpoint.machine.extent import Extent
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.integrations import objects
from dlrover.integrations.named import Reading, Saved, by_chunks

__all__ = ["FlashLoad", "FlashSave"]

_FORMAT = CheckpointingConfig("dlrover")
_DIRECTORY, _COMMON = "directory", "common"


class FlashSave(base.SaveShardedStrategy):
    """Strategy that saves one step with a `Checkpointer`. As in Megatron, only main replicas are kept."""

    can_handle_sharded_objects = True

    def __init__(
        self, checkpointer: Checkpointer, step: int, to: Literal["memory", "storage"] = "memory"
    ) -> None:
        super().__init__(_FORMAT.sharded_backend, _FORMAT.sharded_backend_version)
        self._checkpointer, self._step, self._to = checkpointer, step, to

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Save this rank's part and the common state.

        Raises:
            ConfigurationError: something cannot be kept.
            InfrastructureError: the saver failed, or lacks memory after a restart.
        """
        parts, found = parts_and_objects(sharded_state_dict)
        found[_DIRECTORY] = str(checkpoint_dir)
        if torch.distributed.get_rank() == 0:
            found[_COMMON] = Path(checkpoint_dir, COMMON_STATE_FNAME).read_bytes()
        self._checkpointer.save(self._step, by_chunks(parts, found), to=self._to)


class FlashLoad(base.LoadCommonStrategy, base.LoadShardedStrategy):
    """Strategy that loads the newest step saved with `FlashSave`. It must be passed as both strategies.

    Args:
        checkpointer: the one passed to `FlashSave`.
        trusted: allow reading pickled objects, such as Megatron's arguments, which can run any code.
            Without it, loading such objects is an error.
    """

    can_handle_sharded_objects = True

    def __init__(self, checkpointer: Checkpointer, *, trusted: bool = False) -> None:
        self._reading = Reading(checkpointer)
        self._trusted = trusted
        self._saved: Saved | None = None

    @property
    def record(self) -> LoadRecord | None:
        """The loaded step and its source; None before they are known."""
        return self._reading.record

    def newest(self) -> str | None:
        """Return the directory of the newest step, ready to load; None if nothing was saved. Collective.

        Raises:
            ConfigurationError: the step was not saved with `FlashSave`.
            InfrastructureError: checkpoints existed, and none can be loaded.
        """
        saved = self._reading.look()
        if saved is None:
            return None
        directory = str(saved.objects[_DIRECTORY])
        if torch.distributed.get_rank() == 0:
            Path(directory).mkdir(parents=True, exist_ok=True)
            if maybe_load_config(directory) is None:  # Megatron writes it after the save
                save_config(_FORMAT, directory)
        torch.distributed.barrier()
        return directory

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Refuse checkpoints that other strategies have saved."""
        if loaded_backend not in (_FORMAT.sharded_backend, _FORMAT.common_backend):
            raise ConfigurationError(f"FlashLoad cannot load a checkpoint of {loaded_backend}.")

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Accept any version, as there is only one."""

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        """Load the state that is not sharded. Collective.

        Raises:
            ConfigurationError: the newest step was saved with another directory.
            InfrastructureError: nothing can be loaded.
        """
        saved = self._saved = self._look()
        newest = saved.objects[_DIRECTORY]
        if Path(newest).absolute() != Path(checkpoint_dir).absolute():
            raise ConfigurationError(
                f"{checkpoint_dir} is not held any more; the newest is {newest}."
            )
        return objects.unpickled(saved.objects[_COMMON], "cpu", trusted=self._trusted)

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Fill the tensors of the sharded state. Collective.

        Raises:
            ConfigurationError: something was not saved, or has another shape.
            InfrastructureError: the step is damaged.
        """
        if self._saved is None:
            raise ConfigurationError("FlashLoad must be the common_strategy too.")
        self._reading.take(lambda saved: targets(saved, sharded_state_dict))
        return filled(self._saved, sharded_state_dict, trusted=self._trusted)

    load_sharded_objects = load

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Return the saved tensors, without content. Collective."""
        return described_tensors(self._look())

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Return the saved tensors and objects, without content. Collective."""
        saved = self._look()
        names = saved.objects.keys() - {_DIRECTORY, _COMMON}
        return described_tensors(saved) | described_objects(names)

    def _look(self) -> Saved:
        saved = self._reading.look()
        if saved is None:
            raise InfrastructureError("Nothing was saved that could be loaded.")
        return saved


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
