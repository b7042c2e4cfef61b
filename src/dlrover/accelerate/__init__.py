"""Parallel strategies: plan, explain and apply them."""

from typing import TYPE_CHECKING

from dlrover._util.doors import lazy

if TYPE_CHECKING:
    from dlrover.planning.parallel.records import Cluster, Prediction, Strategy, Transformer

__all__ = ["Cluster", "Prediction", "Strategy", "Transformer"]

__getattr__ = lazy(
    __name__,
    {
        "Cluster": "dlrover.planning.parallel.records",
        "Prediction": "dlrover.planning.parallel.records",
        "Strategy": "dlrover.planning.parallel.records",
        "Transformer": "dlrover.planning.parallel.records",
    },
    extra="torch",
)
