"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.training import ElasticDistributedSampler

__all__ = ["ElasticDistributedSampler"]
