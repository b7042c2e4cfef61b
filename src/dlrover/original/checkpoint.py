"""The original's flash checkpoint: state dicts of a training, on `dlrover.checkpoint.Checkpointer`."""

from __future__ import annotations

import atexit
import enum
import logging
import os
import re
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist

from dlrover import config
from dlrover.checkpoint.engine.checkpointer import Checkpointer as FlashCheckpoint
from dlrover.checkpoint.engine.tree import DTYPES
from dlrover.checkpoint.loading.plan import RankState, Target
from dlrover.checkpoint.machine import layout
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.integrations import objects
from dlrover.original.retention import policy_of

logger = logging.getLogger(__name__)

SAVE_TIMEOUT = 600
TRACKER = "dlrover_latest.txt"
"""The original's file with the number of the newest step."""


class StorageType(enum.Enum):
    """Where a save goes."""

    MEMORY = 0
    DISK = 1


def destination(storage_type: StorageType) -> Literal["memory", "storage"]:
    """Return our word for a `StorageType`.

    Raises:
        ConfigurationError: it is something else.
    """
    if not isinstance(storage_type, StorageType):
        raise ConfigurationError(
            f"storage_type is {storage_type!r}; it must be StorageType.MEMORY or StorageType.DISK."
        )
    return "memory" if storage_type is StorageType.MEMORY else "storage"


def opened(checkpoint_dir: Any, deletion_strategy: Any, replica_count: int = 0) -> FlashCheckpoint:
    """Return the checkpointer of a directory, which the end of the program closes. Collective.

    On several nodes, another node keeps a copy of each step in memory, as in the original each node had one.
    """
    several = int(config.environ().get("GROUP_WORLD_SIZE") or 1) > 1
    made = FlashCheckpoint(
        checkpoint_dir,
        keep=policy_of(deletion_strategy),
        replicas=max(1, replica_count - 1) if several else 0,
    )
    atexit.register(_close, weakref.ref(made), threading.get_ident())
    return made


def _close(made: weakref.ref[FlashCheckpoint], thread: int) -> None:
    checkpointer = made()
    if checkpointer is not None and threading.get_ident() == thread:
        checkpointer.close()


def step_in(path: Any) -> int:
    """Return the step that a path of the original names: its last part that holds a number.

    Raises:
        ConfigurationError: there is no number.
    """
    for part in reversed(Path(path).parts):
        found = re.findall(r"\d+", part) if not part.startswith("rank_") else []
        if found:
            return int(found[-1])
    raise ConfigurationError(
        f"resume_path is {path}: it must be a file of torch.save, or name a step, as 100.pt or 100/rank_0.pt."
    )


class Checkpointer:
    """What the original's checkpointers have in common."""

    _flash: FlashCheckpoint

    def wait_latest_checkpoint(self, timeout: float = 1800) -> None:
        """Wait until every save for storage is durable, however long it takes.

        Raises:
            InfrastructureError: a save failed; the message says which.
        """
        self._flash.wait()

    def close(self) -> None:
        """Disconnect from the saver, which goes on storing what was asked for."""
        self._flash.close()


class DdpCheckpointer(Checkpointer):
    """State dicts that all ranks have alike (one shard), or each rank its own (as many shards as ranks).

    Args:
        checkpoint_dir: the checkpoint directory; all ranks must see the same one.
        local_shard_num: shards that each node saves.
        global_shard_num: shards of all nodes; 1 saves the state dict of rank 0.
        comm_backend: has no effect; the ranks need no communication to save.
        deletion_strategy: which steps to keep; all by default.
        save_timeout: has no effect; a step is published when all of it is stored.
        replica_count: nodes that keep a step in memory.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        local_shard_num: int = 1,
        global_shard_num: int = 1,
        comm_backend: str = "",
        deletion_strategy: Any = None,
        save_timeout: int = SAVE_TIMEOUT,
        replica_count: int = 0,
    ) -> None:
        self.checkpoint_dir = checkpoint_dir
        joined = dist.is_available() and dist.is_initialized()
        self._rank: int = dist.get_rank() if joined else 0
        size = dist.get_world_size() if joined else 1
        if global_shard_num not in (1, size) or not 1 <= local_shard_num <= global_shard_num:
            raise ConfigurationError(
                f"global_shard_num is {global_shard_num} and local_shard_num {local_shard_num}; they must be 1 and 1,"
                f" or {size} (the number of ranks) and the number of ranks of a node."
            )
        self._shards = global_shard_num
        self._flash = opened(checkpoint_dir, deletion_strategy, replica_count)

    def save_checkpoint(
        self,
        step: int,
        state_dict: Mapping[str, Any],
        path: str = "",
        storage_type: StorageType = StorageType.DISK,
    ) -> None:
        """Save a state dict. Collective.

        ``path`` names the step for `load_checkpoint`, and must have its number; ``dlrover ckpt convert`` makes files
        for ``torch.load``.
        """
        if path and step_in(path) != step:
            raise ConfigurationError(f"path is {path}; its last number must be the step, {step}.")
        mine = self._rank == 0 or self._shards > 1
        state = {"state": objects.encode(dict(state_dict)) if mine else {}}
        self._flash.save(step, state, to=destination(storage_type))

    def load_checkpoint(self, resume_path: str = "") -> dict[str, Any]:
        """Return the newest state dict, or the one of ``resume_path``; empty if nothing was ever saved. Collective.

        Reads what the original has stored, too, if we have not stored anything yet.

        Raises:
            ConfigurationError: ``resume_path`` names no stored step, or other ranks saved the shards.
            InfrastructureError: checkpoints existed, and none can be loaded.
        """
        if resume_path and Path(resume_path).is_file():
            return _read_file(Path(resume_path))
        found = self._load(step_in(resume_path) if resume_path else None)
        return self._originals() if found is None else found

    def _load(self, step: int | None) -> dict[str, Any] | None:
        read: list[_SavedState] = []

        def choose(ranks: Mapping[int, RankState]) -> Sequence[Target] | None:
            wanted = self._rank if self._shards > 1 else 0
            if wanted not in ranks and len(ranks) == 1:
                return None
            if self._shards > 1 and len(ranks) != self._shards:
                raise ConfigurationError(
                    f"{self.checkpoint_dir} has the shards of {len(ranks)} ranks; as many must load them, and there"
                    f" are {self._shards}."
                )
            read.append(_SavedState(ranks[wanted]))
            return read[-1].targets

        record = self._flash.load_parts(choose, step)
        return None if record is None else read[-1].state()

    def _originals(self) -> dict[str, Any]:
        """Return the newest state dict that the original has stored; empty if there is none."""
        tracker = Path(self.checkpoint_dir, TRACKER)
        if not tracker.is_file():
            return {}
        step = tracker.read_text().strip()
        shard = self._rank if self._shards > 1 else 0
        file = Path(self.checkpoint_dir, step, f"rank_{shard}.pt")
        if not file.is_file():
            raise InfrastructureError(
                f"{tracker} says that step {step} is stored, and {file} is not there; remove {tracker} to start afresh."
            )
        logger.warning("Step %s was stored by the original; it is read from %s", step, file)
        return _read_file(file)


class _SavedState:
    """The state dict that one rank saved, and tensors to read it into."""

    def __init__(self, saved: RankState) -> None:
        self._tree = layout.decode(saved.skeleton)
        self._tensors = [torch.empty(s.shape, dtype=DTYPES[s.dtype]) for s in saved.tensors]
        self.targets = [
            Target(spec.path, spec.dtype, spec.shape, spec.part, tensor)
            for spec, tensor in zip(saved.tensors, self._tensors, strict=True)
        ]

    def state(self) -> dict[str, Any]:
        tree = layout.replace_refs(self._tree, lambda ref, _: self._tensors[ref.index])
        if not isinstance(tree, dict) or tree.keys() != {"state"}:
            raise ConfigurationError(
                "The checkpoint was not saved by DdpCheckpointer; load it with the class that saved it."
            )
        return objects.decode(tree["state"], trusted=True)


def _read_file(path: Path) -> dict[str, Any]:
    return objects.load(os.fspath(path), str(path), "cpu", trusted=False)


def save_checkpoint(iteration: int, *arguments: Any, **options: Any) -> NoReturn:
    """Say what to write instead of Megatron-LM's checkpoints of 2023."""
    raise ConfigurationError(
        "megatron.checkpointing, which this function was written for, is gone from Megatron-LM; save with"
        " dist_checkpointing.save(state, directory, sharded_strategy=FlashSave(checkpointer, iteration)) of"
        " dlrover.integrations.megatron."
    )


def load_checkpoint(*arguments: Any, **options: Any) -> NoReturn:
    """Say what to write instead of Megatron-LM's checkpoints of 2023."""
    raise ConfigurationError(
        "megatron.checkpointing, which this function was written for, is gone from Megatron-LM; load with"
        " flash = FlashLoad(checkpointer) of dlrover.integrations.megatron, and dist_checkpointing.load(state,"
        " flash.newest(), sharded_strategy=flash, common_strategy=flash)."
    )
