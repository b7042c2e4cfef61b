"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.runtime import current_worker

__all__ = ["current_worker"]
