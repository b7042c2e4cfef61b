"""The original's functions for Megatron-LM of 2023, whose modules are gone."""

from __future__ import annotations

from typing import Any, NoReturn

from dlrover.errors import ConfigurationError
from dlrover.original.checkpoint import StorageType

__all__ = ["StorageType", "load_checkpoint", "save_checkpoint"]


def save_checkpoint(iteration: int, *arguments: Any, **options: Any) -> NoReturn:
    """Say what to write instead."""
    raise ConfigurationError(
        "megatron.checkpointing, which this function was written for, is gone from Megatron-LM; save with"
        " dist_checkpointing.save(state, directory, sharded_strategy=FlashSave(checkpointer, iteration)) of"
        " dlrover.integrations.megatron."
    )


def load_checkpoint(*arguments: Any, **options: Any) -> NoReturn:
    """Say what to write instead."""
    raise ConfigurationError(
        "megatron.checkpointing, which this function was written for, is gone from Megatron-LM; load with"
        " flash = FlashLoad(checkpointer) of dlrover.integrations.megatron, and dist_checkpointing.load(state,"
        " flash.newest(), sharded_strategy=flash, common_strategy=flash)."
    )
