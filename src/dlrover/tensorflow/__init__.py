"""TensorFlow: training that outlives its parameter servers, and sharded data."""

from typing import TYPE_CHECKING

from dlrover._util.doors import lazy

if TYPE_CHECKING:
    from dlrover.tensorflow.data import dataset
    from dlrover.tensorflow.guard import resilient

__all__ = ["dataset", "resilient"]

__getattr__ = lazy(
    __name__,
    {
        "dataset": "dlrover.tensorflow.data",
        "resilient": "dlrover.tensorflow.guard",
    },
    extra="tensorflow",
)
