"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.tensorflow import ElasticDataShardReportHook

__all__ = ["ElasticDataShardReportHook"]
