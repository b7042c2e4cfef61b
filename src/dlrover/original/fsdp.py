"""The original's checkpointers of FSDP models, of both kinds of FSDP, through ``torch.distributed.checkpoint``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dlrover.integrations import objects
from dlrover.integrations.dcp import FlashReader, FlashWriter
from dlrover.original.checkpoint import (
    SAVE_TIMEOUT,
    Checkpointer,
    StorageType,
    destination,
    opened,
    step_in,
)

__all__ = [
    "FsdpCheckpointer", "FsdpDcpCheckpointer", "FsdpFullCheckpointer", "FsdpShardCheckpointer", "StorageType",
]  # fmt: skip


class FsdpShardCheckpointer(Checkpointer):
    """Model and optimizer; each rank saves its part, and any number of ranks can load them.

    Args:
        checkpoint_dir: the checkpoint directory; all ranks must see the same one.
        comm_backend: has no effect; the ranks need no communication to save.
        deletion_strategy: which steps to keep; all by default.
        save_timeout: has no effect; a step is published when all of it is stored.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        comm_backend: str = "",
        deletion_strategy: Any = None,
        save_timeout: int = SAVE_TIMEOUT,
    ) -> None:
        self.checkpoint_dir = checkpoint_dir
        self._flash = opened(checkpoint_dir, deletion_strategy)

    def save_checkpoint(
        self,
        step: int,
        model: torch.nn.Module | Mapping[str, Any],
        optimizer: torch.optim.Optimizer | str = "",
        extra_sd: Mapping[str, Any] | None = None,
        path: str = "",
        storage_type: StorageType = StorageType.DISK,
    ) -> None:
        """Save a model with its optimizer and more values. Collective.

        Takes ``(step, state_dict, path)``, too, for state dicts that `get_storage_reader` reads.
        """
        writer = FlashWriter(self._flash, step, destination(storage_type))
        if isinstance(model, Mapping):
            dcp.save(dict(model), storage_writer=writer)
            return
        weights, states = get_state_dict(model, optimizer)
        extra = objects.pickled(dict(extra_sd or {}), ("extra_sd",))
        dcp.save({"model": weights, "optimizer": states, "extra": extra}, storage_writer=writer)

    def load_checkpoint(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        resume_path: str = "",
    ) -> dict[str, Any]:
        """Restore the newest step, or the one of ``resume_path``; return ``extra_sd``. Collective.

        Returns an empty dict if nothing was ever saved.
        """
        reader = self.get_storage_reader(resume_path)
        if reader is None:
            return {}
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": states, "extra": b""}
        dcp.load(state, storage_reader=reader)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        return objects.unpickled(state["extra"], trusted=True)

    def get_storage_reader(self, resume_path: str = "") -> FlashReader | None:
        """Return a reader for ``torch.distributed.checkpoint.load``; None if nothing was ever saved. Collective."""
        reader = FlashReader(self._flash, step_in(resume_path) if resume_path else None)
        return reader if reader.look() else None


class FsdpFullCheckpointer(FsdpShardCheckpointer):
    """The same as `FsdpShardCheckpointer`: what is saved fits any number of ranks, one included."""


FsdpCheckpointer = FsdpDcpCheckpointer = FsdpShardCheckpointer
