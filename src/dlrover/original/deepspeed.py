"""The original's checkpointer of DeepSpeed engines, on `dlrover.integrations.deepspeed`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlrover.integrations.deepspeed import attach
from dlrover.original.checkpoint import SAVE_TIMEOUT, StorageType, destination
from dlrover.original.retention import policy_of

__all__ = ["DeepSpeedCheckpointer", "StorageType"]


class DeepSpeedCheckpointer:
    """An engine whose ``save_checkpoint`` and ``load_checkpoint`` use memory first. ``torch.save`` stays torch's.

    Args:
        engine: the engine from ``deepspeed.initialize``.
        checkpoint_dir: the directory that all saves go to; all ranks must see the same one.
        comm_backend: has no effect; the ranks need no communication to save.
        deletion_strategy: which steps to keep; all by default.
        save_timeout: has no effect; a step is published when all of it is stored.
    """

    def __init__(
        self,
        engine: Any,
        checkpoint_dir: str,
        comm_backend: str = "",
        deletion_strategy: Any = None,
        save_timeout: int = SAVE_TIMEOUT,
    ) -> None:
        self.engine, self.checkpoint_dir = engine, checkpoint_dir
        self._flash = attach(engine, checkpoint_dir, policy_of(deletion_strategy), trusted=True)

    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        storage_type: StorageType = StorageType.DISK,
    ) -> None:
        """Save the engine. Collective."""
        self._flash.to = destination(storage_type)
        tag = None if tag is None else str(tag)
        self.engine.save_checkpoint(save_dir, tag, dict(client_state or {}), save_latest)

    def load_checkpoint(
        self, load_dir: str, tag: str | None = None, *arguments: Any, **options: Any
    ) -> Any:
        """Restore the newest save; the arguments and the result are those of the engine. Collective."""
        return self.engine.load_checkpoint(load_dir, tag, *arguments, **options)

    def wait_latest_checkpoint(self, timeout: float = 1800) -> None:
        """Wait until every save for storage is durable, however long it takes."""
        self._flash.wait()
