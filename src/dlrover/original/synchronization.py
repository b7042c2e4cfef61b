"""The original's synchronization through the master, which never worked there."""

from __future__ import annotations

from dlrover.errors import ConfigurationError


class SyncClient:
    """A client that no program can make."""

    def __init__(self) -> None:
        raise ConfigurationError(
            "SyncClient does not exist here: use torch.distributed.barrier(), or a TensorFlow cluster's own"
            " coordination; parameter servers are replaced without help from the program (docs/tensorflow.md)."
        )
