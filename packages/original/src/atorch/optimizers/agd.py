"""AGD, as in ATorch."""

from dlrover.optim import AGD

__all__ = ["AGD"]
