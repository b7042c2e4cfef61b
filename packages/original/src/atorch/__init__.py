"""The names of ATorch that scripts import, on DLRover; see docs/from-dlrover.md there."""

from atorch.distributed.distributed import (
    init_distributed,
    local_rank,
    rank,
    reset_distributed,
    world_size,
)
from dlrover.original.absent import refuse

__all__ = ["init_distributed", "local_rank", "rank", "reset_distributed", "world_size"]

_TRAINER = "the Trainer of Transformers with dlrover.integrations.transformers.FlashCallback"
refuse(
    __name__,
    {
        "atorch.checkpoint": "dlrover.checkpoint, or dlrover.integrations.dcp",
        "atorch.trainer": _TRAINER,
    },
)
