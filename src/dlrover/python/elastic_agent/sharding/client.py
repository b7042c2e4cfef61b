"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.sharding import IndexShardingClient, ShardingClient

__all__ = ["IndexShardingClient", "ShardingClient"]
