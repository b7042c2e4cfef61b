"""Optimizers of ATorch, with its parameters."""

from atorch.optimizers.agd import AGD
from atorch.optimizers.wsam import WeightedSAM

__all__ = ["AGD", "WeightedSAM"]
