"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.replaced import FailoverStrategy

__all__ = ["FailoverStrategy"]
