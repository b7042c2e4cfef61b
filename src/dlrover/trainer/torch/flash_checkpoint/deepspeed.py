"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.deepspeed import DeepSpeedCheckpointer, StorageType

__all__ = ["DeepSpeedCheckpointer", "StorageType"]
