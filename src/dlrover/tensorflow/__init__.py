"""Sharded data for TensorFlow."""

from typing import TYPE_CHECKING

from dlrover._util.doors import lazy

if TYPE_CHECKING:
    from dlrover.tensorflow.data import dataset

__all__ = ["dataset"]

__getattr__ = lazy(
    __name__,
    {
        "dataset": "dlrover.tensorflow.data",
    },
    extra="tensorflow",
)
