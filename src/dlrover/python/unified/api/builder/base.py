"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.unified import DLJob, DLJobBuilder

__all__ = ["DLJob", "DLJobBuilder"]
