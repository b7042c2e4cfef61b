"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.training import ElasticTrainer

__all__ = ["ElasticTrainer"]
