"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.checkpoint import DdpCheckpointer, StorageType

__all__ = ["DdpCheckpointer", "StorageType"]
