"""Streams of ``dlrover ingest``, DLRover's own endpoint for records."""

from __future__ import annotations

import http.client
import ssl

from dlrover import config
from dlrover.errors import ConfigurationError
from dlrover.sharding.ingest.client import Endpoint, Reader
from dlrover.sharding.sources.stream import Address, Bounds, Broker, Fetched, Message

PORT = 8090


class Ingest(Broker):
    """``ingest://host:8090/stream``; ``ingests`` with TLS. The token is the password, or DLROVER_INGEST_TOKEN."""

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        address.accept()
        if not address.path or "/" in address.path:
            raise ConfigurationError(f"The address {address} must name one stream.")
        self.transient = (OSError, http.client.HTTPException)
        self.hopeless = (ssl.SSLCertVerificationError,)
        scheme = "https" if address.scheme == "ingests" else "http"
        host = f"[{address.host}]" if ":" in address.host else address.host
        token = address.password or config.environ().get("DLROVER_INGEST_TOKEN", "")
        self._endpoint = Endpoint(f"{scheme}://{host}:{address.port or PORT}", token)
        self._reader = Reader(self._endpoint, address.path)

    @property
    def identity(self) -> str:
        """The stream."""
        return f"ingest {self.address.path}"

    def bounds(self) -> list[Bounds]:
        """How much there is of each partition."""
        return [Bounds(first, end) for first, end in self._reader.bounds()]

    def fetch(self, partition: int, start: int, stop: int, most: int) -> Fetched:
        """Read records; between two offsets there is one at each."""
        found = self._reader.read(partition, start, stop, most)
        messages = [
            Message(partition, offset, value)
            for offset, value in enumerate(found.records, found.first)
        ]
        reached = messages[-1].offset + 1 if messages else max(start, min(found.first, stop))
        return Fetched(messages, reached, found.first)

    def close(self) -> None:
        """Close the connection."""
        self._endpoint.close()
