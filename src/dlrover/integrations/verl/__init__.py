"""verl's worker groups, made anew by themselves when an actor dies: ``python -m dlrover.integrations.verl -m MODULE``."""

from typing import TYPE_CHECKING

from dlrover._util.doors import lazy

if TYPE_CHECKING:
    from dlrover.integrations.verl.group import WorkerGroup
    from dlrover.integrations.verl.history import Repair
    from dlrover.integrations.verl.launch import install

__all__ = ["Repair", "WorkerGroup", "install"]

__getattr__ = lazy(
    __name__,
    {
        "Repair": "dlrover.integrations.verl.history",
        "WorkerGroup": "dlrover.integrations.verl.door",
        "install": "dlrover.integrations.verl.launch",
    },
)
