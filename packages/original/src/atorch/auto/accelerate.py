"""`auto_accelerate`, as in ATorch."""

from dlrover.accelerate import auto_accelerate

__all__ = ["auto_accelerate"]
