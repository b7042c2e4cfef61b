"""TFPlus: its variables were operations inside of TensorFlow, so its names say what to write instead."""

from typing import Any

from dlrover.errors import ConfigurationError
from dlrover.original.absent import refuse

INSTEAD = {
    "get_kv_variable": "dlrover.embedding.HashTable, or dlrover.embedding.open_table for one on servers",
    "embedding_lookup": "dlrover.embedding.HashTable.lookup, or HashEmbedding in PyTorch",
    "GroupAdam": "dlrover.optim.GroupAdam",
}
refuse(__name__, {"tfplus.kv_variable": "dlrover.embedding, and dlrover.optim for its optimizers"})


def __getattr__(name: str) -> Any:
    if name not in INSTEAD:
        raise AttributeError(f"module 'tfplus' has no attribute {name!r}")

    def refused(*_: Any, **__: Any) -> Any:
        raise ConfigurationError(f"tfplus.{name} does not exist here: use {INSTEAD[name]}.")

    return refused
