"""Optimizers, and wrappers that synchronize seldom (EDiT, DiLoCo)."""

from typing import TYPE_CHECKING

from dlrover._util.doors import lazy

if TYPE_CHECKING:
    from dlrover.optim.adamw import AdamW8bit
    from dlrover.optim.agd import AGD, AGD8bit
    from dlrover.optim.group_lasso import GroupAdagrad, GroupAdam
    from dlrover.optim.local.diloco import DiLoCo
    from dlrover.optim.local.edit import AEDiT, EDiT
    from dlrover.optim.machine.penalty import Penalty
    from dlrover.optim.wsam import WSAM

__all__ = [
    "AGD",
    "WSAM",
    "AEDiT",
    "AGD8bit",
    "AdamW8bit",
    "DiLoCo",
    "EDiT",
    "GroupAdagrad",
    "GroupAdam",
    "Penalty",
]

__getattr__ = lazy(
    __name__,
    {
        "AEDiT": "dlrover.optim.local.edit",
        "AGD": "dlrover.optim.agd",
        "AGD8bit": "dlrover.optim.agd",
        "AdamW8bit": "dlrover.optim.adamw",
        "DiLoCo": "dlrover.optim.local.diloco",
        "EDiT": "dlrover.optim.local.edit",
        "GroupAdagrad": "dlrover.optim.group_lasso",
        "GroupAdam": "dlrover.optim.group_lasso",
        "Penalty": "dlrover.optim.machine.penalty",
        "WSAM": "dlrover.optim.wsam",
    },
    extra="torch",
)
