"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.checkpoint import StorageType, load_checkpoint, save_checkpoint

__all__ = ["StorageType", "load_checkpoint", "save_checkpoint"]
