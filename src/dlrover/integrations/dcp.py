"""``torch.distributed.checkpoint.save`` and ``load`` through memory.

::

    dcp.save(state, storage_writer=FlashWriter(checkpointer, step))
    dcp.load(state, storage_reader=FlashReader(checkpointer))

DCP's planners decide which rank saves what. Everything that DCP can save, and load in another layout,
therefore works here too, for example FSDP1's sharded state dicts.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dlrover.checkpoint.engine.checkpointer import Checkpointer, LoadRecord
from dlrover.checkpoint.engine.tree import Shard
from dlrover.checkpoint.loading.plan import Target
from dlrover.checkpoint.machine.extent import Extent
from dlrover.errors import InfrastructureError
from dlrover.integrations.named import Reading, Saved, by_tensors

__all__ = ["FlashReader", "FlashWriter"]


class _Placeless:
    """Methods that do nothing here: the checkpointer sets the place, and DCP makes the plans."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing."""

    def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    set_up_storage_reader = set_up_storage_writer

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Return the plans unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: paths are not used."""
        return False


class FlashWriter(_Placeless, dcp.StorageWriter):
    """DCP writer that saves one step with a `Checkpointer`, without DCP's file formats and paths."""

    def __init__(
        self, checkpointer: Checkpointer, step: int, to: Literal["memory", "storage"] = "memory"
    ) -> None:
        self._checkpointer, self._step, self._to = checkpointer, step, to

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """Save what the plan assigns to this rank."""
        parts: list[tuple[str, Shard]] = []
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
                whole = item.tensor_data.size
                at = item.index.offset or (0,) * len(whole)
                parts.append((name, Shard(data.detach(), tuple(whole), tuple(at))))
                size = data.nbytes
            results.append(WriteResult(item.index, size, None))
        self._checkpointer.save(self._step, by_tensors(parts, objects), to=self._to)
        return _done(results)

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: each rank has sent its part to its saver."""


class FlashReader(_Placeless, dcp.StorageReader):
    """DCP reader that loads the newest step saved with a `FlashWriter`, or another stored one.

    Args:
        checkpointer: the one passed to `FlashWriter`.
        step: a stored step to go back to.
    """

    def __init__(self, checkpointer: Checkpointer, step: int | None = None) -> None:
        self._reading = Reading(checkpointer, step)
        self._objects: dict[str, bytes] = {}

    @property
    def record(self) -> LoadRecord | None:
        """The loaded step and its source; None before they are known."""
        return self._reading.record

    def look(self) -> bool:
        """Return whether there is something to load. Collective."""
        return self._reading.look() is not None

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return the metadata of what was saved. Collective.

        Raises:
            InfrastructureError: nothing was saved, or nothing can be loaded.
        """
        saved = self._reading.look()
        if saved is None:
            raise InfrastructureError("Nothing was saved that could be loaded.")
        self._objects = saved.objects
        found: dict[str, Any] = dict.fromkeys(saved.objects, described.BytesStorageMetadata())
        found |= {name: _described(saved, name) for name in saved.parts}
        return dcp.Metadata(state_dict_metadata=found)

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """Load what the plan assigns to this rank. Collective."""
        tensors = []
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._objects[item.storage_index.fqn]))
            else:
                tensors.append((item, planner.resolve_tensor(item).detach()))
        self._reading.take(lambda saved: [t for pair in tensors for t in _targets(saved, *pair)])
        for item, tensor in tensors:
            planner.commit_tensor(item, tensor)
        return _done(None)


def _done(value: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(value)
    return done


def _described(saved: Saved, name: str) -> described.TensorStorageMetadata:
    boxes = [extent for extent, _ in saved.parts[name]]
    chunks = [described.ChunkStorageMetadata(torch.Size(b.at), torch.Size(b.shape)) for b in boxes]
    properties = described.TensorProperties(dtype=saved.dtype(name))
    return described.TensorStorageMetadata(properties, torch.Size(saved.whole(name)), chunks)


def _targets(saved: Saved, item: Any, tensor: torch.Tensor) -> Iterator[Target]:
    name = item.storage_index.fqn
    start = item.storage_index.offset or (0,) * len(item.lengths)
    at = tuple(a + b for a, b in zip(start, item.storage_offsets, strict=True))
    return saved.targets(name, Extent(saved.whole(name), at, tuple(item.lengths)), tensor)
