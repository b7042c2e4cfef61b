"""Training on any number of workers: the same global batch, the same order of samples, and a report of progress."""

from typing import TYPE_CHECKING

from dlrover._util.doors import lazy

if TYPE_CHECKING:
    from dlrover.training.batch import accumulation_steps
    from dlrover.training.replicas.replicas import Replicas
    from dlrover.training.replicas.restarts import restartable
    from dlrover.training.sampler import ElasticDistributedSampler
    from dlrover.training.trainer import ElasticTrainer
    from dlrover.training.worker.tracker import activity, steps_left

__all__ = [
    "ElasticDistributedSampler",
    "ElasticTrainer",
    "Replicas",
    "accumulation_steps",
    "activity",
    "restartable",
    "steps_left",
]

__getattr__ = lazy(
    __name__,
    {
        "ElasticDistributedSampler": "dlrover.training.sampler",
        "ElasticTrainer": "dlrover.training.trainer",
        "Replicas": "dlrover.training.replicas.replicas",
        "accumulation_steps": "dlrover.training.batch",
        "activity": "dlrover.training.worker.tracker",
        "restartable": "dlrover.training.replicas.restarts",
        "steps_left": "dlrover.training.worker.tracker",
    },
    extra="torch",
)
