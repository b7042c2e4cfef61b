"""The names of ATorch that scripts import, on DLRover; see docs/from-dlrover.md there."""

from dlrover.original.absent import refuse

_TRAINER = "the Trainer of Transformers with dlrover.integrations.transformers.FlashCallback"
refuse(
    __name__,
    {
        "atorch.checkpoint": "dlrover.checkpoint, or dlrover.integrations.dcp",
        "atorch.distributed": "torch.distributed, or dlrover.accelerate for parallel groups",
        "atorch.trainer": _TRAINER,
    },
)
