"""The names of ATorch that scripts import, on DLRover; see docs/from-dlrover.md there."""

from dlrover._util.doors import lazy
from dlrover.original.absent import refuse

__all__ = ["init_distributed", "local_rank", "rank", "reset_distributed", "world_size"]

__getattr__ = lazy(
    __name__, dict.fromkeys(__all__, "atorch.distributed.distributed"), extra="torch"
)

_TRAINER = "the Trainer of Transformers with dlrover.integrations.transformers.FlashCallback"
refuse(
    __name__,
    {
        "atorch.checkpoint": "dlrover.checkpoint, or dlrover.integrations.dcp",
        "atorch.trainer": _TRAINER,
    },
)
