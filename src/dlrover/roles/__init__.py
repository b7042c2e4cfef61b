"""Jobs of several roles, such as SFT and RL, whose roles fail alone: calls between them, queues and weights."""

from typing import TYPE_CHECKING

from dlrover._util.doors import lazy

if TYPE_CHECKING:
    from dlrover.roles.builder import Job
    from dlrover.roles.runtime import weights
    from dlrover.roles.runtime.exporting import rpc
    from dlrover.roles.runtime.groups import RoleGroup
    from dlrover.roles.runtime.queue import Queue
    from dlrover.roles.runtime.worker import current_worker

__all__ = ["Job", "Queue", "RoleGroup", "current_worker", "rpc", "weights"]

__getattr__ = lazy(
    __name__,
    {
        "Job": "dlrover.roles.builder",
        "Queue": "dlrover.roles.runtime.queue",
        "RoleGroup": "dlrover.roles.runtime.groups",
        "current_worker": "dlrover.roles.runtime.worker",
        "rpc": "dlrover.roles.runtime.exporting",
        "weights": "dlrover.roles.runtime.weights",
    },
    extra="roles",
)
