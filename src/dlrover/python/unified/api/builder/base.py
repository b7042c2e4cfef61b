"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.unified import DLJobBuilder

__all__ = ["DLJobBuilder"]
