"""A read-only server as a whole: what it follows, and both of its ports."""

from __future__ import annotations

import threading

from dlrover.embedding.remote.listener import RowListener
from dlrover.embedding.serving import raw
from dlrover.embedding.serving.follower import CheckpointFollower
from dlrover.embedding.serving.http import HttpServer
from dlrover.errors import ConfigurationError

CLOSE_POLL = 0.1
"""Seconds between two looks of the HTTP server for its end."""


class ReadOnlyServer:
    """Serves the tables of a checkpoint once made, and follows newer ones once started.

    Args:
        place: Directory or URL of checkpoints, or a file of `HashTable.save`.
        token: Text that clients must give.
        host: Address to listen on.
        port: Port for HTTP; 0 for any free one.
        raw_port: Port for the raw protocol; 0 for any free one.
        poll: Seconds between two looks for newer checkpoints.

    Raises:
        NoCheckpointError: There is no checkpoint.
        ConfigurationError: An address cannot be listened on.
        InfrastructureError: The checkpoint is damaged.
    """

    def __init__(
        self,
        place: str,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        raw_port: int = 0,
        poll: float = 1.0,
    ) -> None:
        self.follower = CheckpointFollower(place, poll)
        try:
            self._http = HttpServer((host, port), self.follower, token)
        except OSError as error:
            raise ConfigurationError(f"{host}:{port} cannot be listened on: {error}.") from error
        try:
            self._raw = RowListener(
                host, lambda sock: raw.ReaderConnection(sock, self.follower), port=raw_port
            )
        except OSError as error:
            self._http.server_close()
            raise ConfigurationError(
                f"{host}:{raw_port} cannot be listened on: {error}."
            ) from error
        self.port: int = self._http.server_address[1]
        self.raw_port = self._raw.port
        self._secret = raw.secret_of(token)
        self._threads = [
            threading.Thread(
                target=self._http.serve_forever, args=(CLOSE_POLL,), name="http", daemon=True
            ),
            threading.Thread(target=self.follower.run, name="follow", daemon=True),
        ]

    def start(self) -> None:
        """Answer, and follow newer checkpoints."""
        self._raw.start(self._secret)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Close all connections."""
        self.follower.close()
        self._raw.close()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join()
