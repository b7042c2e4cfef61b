"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.retention import (
    CheckpointDeletionStrategy,
    KeepLatestStepStrategy,
    KeepStepIntervalStrategy,
)

__all__ = ["CheckpointDeletionStrategy", "KeepLatestStepStrategy", "KeepStepIntervalStrategy"]
