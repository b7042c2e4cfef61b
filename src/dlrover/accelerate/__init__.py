"""Parallel strategies: plan, explain and apply them."""

from typing import TYPE_CHECKING

from dlrover._util.doors import lazy

if TYPE_CHECKING:
    from dlrover.accelerate.anatomy import traced
    from dlrover.accelerate.engine import AutoAccelerateResult, auto_accelerate
    from dlrover.accelerate.optimizers import clip_grad_norm_
    from dlrover.planning.parallel.calibration import calibrate
    from dlrover.planning.parallel.explain import Explanation, why_not
    from dlrover.planning.parallel.predict import predict
    from dlrover.planning.parallel.records import (
        Cluster,
        Observation,
        Prediction,
        Residual,
        Strategy,
        Transformer,
    )
    from dlrover.planning.parallel.search import search

__all__ = [
    "AutoAccelerateResult",
    "Cluster",
    "Explanation",
    "Observation",
    "Prediction",
    "Residual",
    "Strategy",
    "Transformer",
    "auto_accelerate",
    "calibrate",
    "clip_grad_norm_",
    "predict",
    "search",
    "traced",
    "why_not",
]

_RECORDS = "dlrover.planning.parallel.records"

__getattr__ = lazy(
    __name__,
    {
        "AutoAccelerateResult": "dlrover.accelerate.engine",
        "auto_accelerate": "dlrover.accelerate.engine",
        "clip_grad_norm_": "dlrover.accelerate.optimizers",
        "Cluster": _RECORDS,
        "Explanation": "dlrover.planning.parallel.explain",
        "Observation": _RECORDS,
        "Prediction": _RECORDS,
        "Residual": _RECORDS,
        "Strategy": _RECORDS,
        "Transformer": _RECORDS,
        "calibrate": "dlrover.planning.parallel.calibration",
        "predict": "dlrover.planning.parallel.predict",
        "search": "dlrover.planning.parallel.search",
        "traced": "dlrover.accelerate.anatomy",
        "why_not": "dlrover.planning.parallel.explain",
    },
    extra="torch,planning",
)
