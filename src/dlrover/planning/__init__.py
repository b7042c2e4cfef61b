"""Models that predict what a job will do. Pure: numbers in, numbers out."""

from typing import TYPE_CHECKING

from dlrover._util.doors import lazy

if TYPE_CHECKING:
    from dlrover.planning.cluster import Demand, Option, allocate
    from dlrover.planning.memory import GIB, MemorySample, prevent_oom
    from dlrover.planning.parameter_server import ServerSample, ServerShape, fit_servers
    from dlrover.planning.plans import ServerSpace, plan_servers, sample_servers

__all__ = [
    "GIB",
    "Demand",
    "MemorySample",
    "Option",
    "ServerSample",
    "ServerShape",
    "ServerSpace",
    "allocate",
    "fit_servers",
    "plan_servers",
    "prevent_oom",
    "sample_servers",
]

__getattr__ = lazy(
    __name__,
    {
        "Demand": "dlrover.planning.cluster",
        "GIB": "dlrover.planning.memory",
        "MemorySample": "dlrover.planning.memory",
        "Option": "dlrover.planning.cluster",
        "ServerSample": "dlrover.planning.parameter_server",
        "ServerShape": "dlrover.planning.parameter_server",
        "ServerSpace": "dlrover.planning.plans",
        "allocate": "dlrover.planning.cluster",
        "fit_servers": "dlrover.planning.parameter_server",
        "plan_servers": "dlrover.planning.plans",
        "prevent_oom": "dlrover.planning.memory",
        "sample_servers": "dlrover.planning.plans",
    },
    extra="planning",
)
