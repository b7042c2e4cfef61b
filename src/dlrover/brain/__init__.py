"""The Brain: keeps what jobs have measured, and plans their resources from it. Needs the extra ``brain``."""

from typing import TYPE_CHECKING

from dlrover._util.doors import lazy

if TYPE_CHECKING:
    from dlrover.brain.optimizers import Optimizer
    from dlrover.rpc.brain import BrainClient, request_id
    from dlrover.spec.brain import (
        Description,
        Range,
        RegisterJob,
        ReportOutcome,
        ReportSamples,
        Sample,
        Shape,
        Space,
    )
    from dlrover.spec.plan import NodeGroup

__all__ = [
    "BrainClient",
    "Description",
    "NodeGroup",
    "Optimizer",
    "Range",
    "RegisterJob",
    "ReportOutcome",
    "ReportSamples",
    "Sample",
    "Shape",
    "Space",
    "request_id",
]

__getattr__ = lazy(
    __name__,
    {
        "BrainClient": "dlrover.rpc.brain",
        "Description": "dlrover.spec.brain",
        "NodeGroup": "dlrover.spec.plan",
        "Optimizer": "dlrover.brain.optimizers",
        "Range": "dlrover.spec.brain",
        "RegisterJob": "dlrover.spec.brain",
        "ReportOutcome": "dlrover.spec.brain",
        "ReportSamples": "dlrover.spec.brain",
        "Sample": "dlrover.spec.brain",
        "Shape": "dlrover.spec.brain",
        "Space": "dlrover.spec.brain",
        "request_id": "dlrover.rpc.brain",
    },
    extra="brain",
)
