"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.synchronization import SyncClient

__all__ = ["SyncClient"]
