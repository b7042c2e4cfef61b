"""Hash embeddings: rows by any key, which grow, filter and expire, in this process or on servers."""

from typing import TYPE_CHECKING

from dlrover._util.doors import lazy

if TYPE_CHECKING:
    from dlrover.embedding.modules import (
        EmbeddingOptimizer,
        HashEmbedding,
        HashEmbeddingBag,
        prefetched,
    )
    from dlrover.embedding.options import (
        BloomAdmission,
        ChanceAdmission,
        CountAdmission,
        Expiry,
        Initializer,
        RowOptimizer,
        Spill,
    )
    from dlrover.embedding.remote.table import RemoteTable, checkpoints, open_table
    from dlrover.embedding.serving.raw import ServedTables
    from dlrover.embedding.table import HashTable, text_keys

__all__ = [
    "BloomAdmission",
    "ChanceAdmission",
    "CountAdmission",
    "EmbeddingOptimizer",
    "Expiry",
    "HashEmbedding",
    "HashEmbeddingBag",
    "HashTable",
    "Initializer",
    "RemoteTable",
    "RowOptimizer",
    "ServedTables",
    "Spill",
    "checkpoints",
    "open_table",
    "prefetched",
    "text_keys",
]

__getattr__ = lazy(
    __name__,
    {
        "BloomAdmission": "dlrover.embedding.options",
        "ChanceAdmission": "dlrover.embedding.options",
        "CountAdmission": "dlrover.embedding.options",
        "EmbeddingOptimizer": "dlrover.embedding.modules",
        "Expiry": "dlrover.embedding.options",
        "HashEmbedding": "dlrover.embedding.modules",
        "HashEmbeddingBag": "dlrover.embedding.modules",
        "HashTable": "dlrover.embedding.table",
        "Initializer": "dlrover.embedding.options",
        "RowOptimizer": "dlrover.embedding.options",
        "Spill": "dlrover.embedding.options",
        "RemoteTable": "dlrover.embedding.remote.table",
        "ServedTables": "dlrover.embedding.serving.raw",
        "checkpoints": "dlrover.embedding.remote.table",
        "open_table": "dlrover.embedding.remote.table",
        "prefetched": "dlrover.embedding.modules",
        "text_keys": "dlrover.embedding.table",
    },
    extra="embedding",
)
