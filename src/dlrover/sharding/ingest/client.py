"""The other side of the endpoint: pushing records, and reading them."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from dlrover.errors import ConfigurationError, InfrastructureError

TIMEOUT = 30.0
"""Seconds that a request may take."""
PATIENCE = 600.0
"""Seconds that a producer waits for an endpoint that is away or full."""
BATCH = 1000
"""Records of a batch."""
BATCH_BYTES = 4 * 1024 * 1024
RETRY_DELAYS = (0.1, 0.2, 0.5, 1.0, 2.0)
_AGAIN = {429, 500, 502, 503, 504, 507}


class Endpoint:
    """A connection to an endpoint, used by one thread.

    Args:
        url: ``http://host:port`` or ``https://host:port``.
        token: the endpoint's.
        tls: for ``https``: whom to trust; by default the system's certificates.

    Raises:
        ConfigurationError: the URL is another kind.
    """

    def __init__(self, url: str, token: str, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(
                f"{url} is no endpoint; it must be http://HOST:PORT or https://."
            )
        self._where = parts.scheme, parts.hostname, parts.port
        self._headers = {"Authorization": f"Bearer {token}"}
        self._tls = tls
        self._connection: http.client.HTTPConnection | None = None

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes]:
        """Status and body of one answer; a connection that broke is opened again by the next request.

        Raises:
            OSError, http.client.HTTPException: there was no answer.
        """
        if self._connection is None:
            scheme, host, port = self._where
            self._connection = (
                http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=self._tls)
                if scheme == "https"
                else http.client.HTTPConnection(host, port, timeout=TIMEOUT)
            )
        try:
            self._connection.request(method, path, body, {**self._headers, **headers})
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException):
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Read(msgspec.Struct, frozen=True):
    """Records from an offset on."""

    first: int
    """The offset of the first; behind the one asked for if that is no longer kept."""
    records: list[bytes]


class Reader:
    """Reads one stream of an endpoint."""

    def __init__(self, endpoint: Endpoint, stream: str) -> None:
        self._endpoint = endpoint
        self._path = f"/v1/streams/{quote(stream, safe='')}"

    def bounds(self) -> list[tuple[int, int]]:
        """The first offset of each partition, and the one behind its last.

        Raises:
            OSError, http.client.HTTPException: the endpoint cannot be reached.
            ConfigurationError: it refuses: the token or the stream is wrong.
        """
        answer = json.loads(self._get(self._path))
        return [(first, end) for first, end in answer["partitions"]]

    def read(self, partition: int, start: int, stop: int, most: int) -> Read:
        """Records between two offsets, ``most`` at most; raises like `bounds`."""
        query = urlencode({"partition": partition, "start": start, "stop": stop, "most": most})
        return msgspec.msgpack.decode(self._get(f"{self._path}/records?{query}"), type=Read)

    def _get(self, path: str) -> bytes:
        status, body = self._endpoint.ask("GET", path)
        if status in _AGAIN:
            raise ConnectionError(f"the endpoint answered {status}: {_reason(body)}")
        if status != http.client.OK:
            raise ConfigurationError(f"The endpoint refuses ({status}): {_reason(body)}.")
        return body


class Producer:
    """Pushes records to a stream; each is there once, however often a batch has to be sent.

    Args:
        endpoint: where to.
        stream: its name.
        name: tells producers apart. Whoever does the same work again, as a task that is retried, has the same
            name and pushes the same records in the same order: they are kept once.
        partition: where to; by default it follows from the name.
    """

    def __init__(
        self, endpoint: Endpoint, stream: str, name: str, partition: int | None = None
    ) -> None:
        self._endpoint, self._name = endpoint, name
        where = "" if partition is None else f"?partition={partition}"
        self._path = f"/v1/streams/{quote(stream, safe='')}/records{where}"
        self._sequence = 0

    def push(self, records: Iterable[Any]) -> int:
        """Push records, in batches; how many there were.

        Args:
            records: bytes are kept as they are, all others as JSON.

        Raises:
            ConfigurationError: the endpoint refuses them.
            InfrastructureError: it was away or full for `PATIENCE` seconds.
        """
        count = 0
        for batch in _batches(records):
            self._send(msgspec.msgpack.encode(batch))
            count += len(batch)
        return count

    def _send(self, body: bytes) -> None:
        until = time.monotonic() + PATIENCE
        headers = {
            "Content-Type": "application/msgpack",
            "Dlrover-Producer": self._name,
            "Dlrover-Sequence": str(self._sequence),
        }
        attempt = 0
        while True:
            try:
                status, answer = self._endpoint.ask("POST", self._path, body, **headers)
                why = f"{status}, {_reason(answer)}"
            except (OSError, http.client.HTTPException) as error:
                status, why = 503, str(error)
            if status == http.client.OK:
                self._sequence += 1
                return
            if status not in _AGAIN:
                raise ConfigurationError(f"The endpoint refuses the records: {why}.")
            delay = RETRY_DELAYS[min(attempt, len(RETRY_DELAYS) - 1)]
            if time.monotonic() + delay > until:
                raise InfrastructureError(f"The endpoint does not take the records: {why}.")
            attempt += 1
            threading.Event().wait(delay)


def _batches(records: Iterable[Any]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for record in records:
        data = (
            bytes(record) if isinstance(record, bytes | bytearray) else msgspec.json.encode(record)
        )
        if batch and (len(batch) >= BATCH or size + len(data) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(data)
        size += len(data)
    if batch:
        yield batch


def _reason(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return "no reason is given"
