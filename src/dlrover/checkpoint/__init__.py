"""Flash Checkpoint: state saves to memory in about the time of one copy, to storage in the background.

The public names load torch on first use, because the saver, which is part of this package, runs without
torch most of the time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrover.checkpoint.checkpointer import Checkpointer, LoadRecord
    from dlrover.checkpoint.policies import KeepBest, KeepEvery, KeepLast
    from dlrover.checkpoint.tree import Shard

__all__ = ["Checkpointer", "KeepBest", "KeepEvery", "KeepLast", "LoadRecord", "Shard"]

_HOMES = {
    "Checkpointer": "checkpointer",
    "KeepBest": "policies",
    "KeepEvery": "policies",
    "KeepLast": "policies",
    "LoadRecord": "checkpointer",
    "Shard": "tree",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dlrover.checkpoint.{_HOMES[name]}"), name)
