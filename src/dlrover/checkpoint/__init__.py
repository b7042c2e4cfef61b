"""Flash Checkpoint: state saves to memory in about the time of one copy, to storage in the background."""

from typing import TYPE_CHECKING

from dlrover._util.doors import lazy

if TYPE_CHECKING:
    from dlrover.checkpoint.engine.checkpointer import Checkpointer, LoadRecord
    from dlrover.checkpoint.engine.tree import Shard
    from dlrover.checkpoint.machine.policies import KeepBest, KeepEvery, KeepLast

__all__ = ["Checkpointer", "KeepBest", "KeepEvery", "KeepLast", "LoadRecord", "Shard"]

__getattr__ = lazy(
    __name__,
    {
        "Checkpointer": "dlrover.checkpoint.engine.checkpointer",
        "KeepBest": "dlrover.checkpoint.machine.policies",
        "KeepEvery": "dlrover.checkpoint.machine.policies",
        "KeepLast": "dlrover.checkpoint.machine.policies",
        "LoadRecord": "dlrover.checkpoint.engine.checkpointer",
        "Shard": "dlrover.checkpoint.engine.tree",
    },
    extra="torch",
)
