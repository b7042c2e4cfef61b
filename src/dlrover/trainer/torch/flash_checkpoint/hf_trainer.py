"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.transformers import FlashCkptTrainer

__all__ = ["FlashCkptTrainer"]
