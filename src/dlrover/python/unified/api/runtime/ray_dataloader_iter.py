"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.runtime import RayDataLoaderIter, patch_dataloader_ray

__all__ = ["RayDataLoaderIter", "patch_dataloader_ray"]
