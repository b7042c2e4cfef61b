"""Names of the original. See docs/from-dlrover.md; made by scripts/original-names."""

from dlrover.original.fsdp import (
    FsdpCheckpointer,
    FsdpDcpCheckpointer,
    FsdpFullCheckpointer,
    FsdpShardCheckpointer,
    StorageType,
)

__all__ = [
    "FsdpCheckpointer",
    "FsdpDcpCheckpointer",
    "FsdpFullCheckpointer",
    "FsdpShardCheckpointer",
    "StorageType",
]
