"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.runtime import patch_dataloader_ray

__all__ = ["patch_dataloader_ray"]
