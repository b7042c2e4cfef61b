"""``torch.distributed.checkpoint.save`` and ``load`` by way of memory.

::

    dcp.save(state, storage_writer=FlashWriter(checkpointer, step))
    dcp.load(state, storage_reader=FlashReader(checkpointer))

DCP's planners decide which rank saves what, so everything that DCP can save, and load in another layout,
can be saved and loaded here: FSDP1's sharded state dicts, for one.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dlrover.checkpoint import layout as layouts
from dlrover.checkpoint.checkpointer import Checkpointer, LoadRecord
from dlrover.checkpoint.extent import Extent
from dlrover.checkpoint.plan import RankState, Target
from dlrover.checkpoint.tree import DTYPES, Shard
from dlrover.errors import ConfigurationError, InfrastructureError

_TENSORS, _OBJECTS = "tensors", "objects"


class FlashWriter(StorageWriter):
    """Saves one step with a `Checkpointer`. DCP's own file formats and paths are not used."""

    def __init__(
        self, checkpointer: Checkpointer, step: int, to: Literal["memory", "storage"] = "memory"
    ) -> None:
        self._checkpointer, self._step, self._to = checkpointer, step, to

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: the place is the checkpointer's."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """The plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save what the plan gives to this rank."""
        tensors: dict[str, Shard] = {}
        objects: dict[str, bytes] = {}
        results = []
        for item in plan.items:
            name, data = item.index.fqn, planner.resolve_data(item)
            if item.type is WriteItemType.BYTE_IO:
                assert isinstance(data, io.BytesIO)
                objects[name] = data.getvalue()
                size = len(objects[name])
            else:
                assert isinstance(data, torch.Tensor)
                if name in tensors:
                    raise ConfigurationError(f"This rank has several parts of the tensor {name}.")
                whole = item.tensor_data.size
                at = item.index.offset or (0,) * len(whole)
                tensors[name] = Shard(data.detach(), tuple(whole), tuple(at))
                size = data.nbytes
            results.append(WriteResult(item.index, size, None))
        state = {_TENSORS: tensors, _OBJECTS: objects}
        self._checkpointer.save(self._step, state, to=self._to)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing to do: each rank has told its saver what it has."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No path is this writer's."""
        return False


class FlashReader(StorageReader):
    """Loads the newest step that was saved with a `FlashWriter`."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self._ranks: Mapping[int, RankState] = {}
        self.record: LoadRecord | None = None
        """Which step, and where it was; None before it is known."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: the place is the checkpointer's."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What was saved.

        Raises:
            InfrastructureError: nothing was.
        """

        def look(ranks: Mapping[int, RankState]) -> list[Target]:
            self._ranks = ranks
            return []

        self.record = self._checkpointer.load_parts(look)
        if self.record is None:
            raise InfrastructureError("Nothing was saved that could be loaded.")
        described: dict[str, Any] = dict.fromkeys(self._objects(), BytesStorageMetadata())
        for state in self._ranks.values():
            for tensor in state.tensors:
                _describe(described, tensor)
        return Metadata(state_dict_metadata=described)

    def _objects(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for state in self._ranks.values():
            found.update(layouts.decode(state.skeleton).get(_OBJECTS, {}))
        return found

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load what the plan gives to this rank."""
        objects = self._objects()
        tensors = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(objects[item.storage_index.fqn]))
            else:
                tensors.append((item, planner.resolve_tensor(item).detach()))

        def choose(ranks: Mapping[int, RankState]) -> list[Target]:
            known = {tensor.path: tensor for state in ranks.values() for tensor in state.tensors}
            return [_target(known, item, tensor) for item, tensor in tensors]

        record = self._checkpointer.load_parts(choose)
        if record is None or self.record is None or record.step != self.record.step:
            raise InfrastructureError("The checkpoint has changed while it was loaded.")
        for item, tensor in tensors:
            planner.commit_tensor(item, tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No path is this reader's."""
        return False


def _describe(described: dict[str, Any], tensor: layouts.Tensor) -> None:
    whole, at, shape = map(torch.Size, layouts.extent_of(tensor.shape, tensor.part))
    known = described.setdefault(
        str(tensor.path[-1]),
        TensorStorageMetadata(TensorProperties(dtype=DTYPES[tensor.dtype]), whole, []),
    )
    known.chunks.append(ChunkStorageMetadata(offsets=at, sizes=shape))


def _target(
    known: Mapping[layouts.Path, layouts.Tensor], item: Any, tensor: torch.Tensor
) -> Target:
    path = (_TENSORS, item.storage_index.fqn)
    saved = known[path]
    start = item.storage_index.offset or (0,) * len(item.lengths)
    at = tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True))
    whole = layouts.extent_of(saved.shape, saved.part).whole
    return Target(path, saved.dtype, Extent(whole, at, tuple(item.lengths)), tensor)
