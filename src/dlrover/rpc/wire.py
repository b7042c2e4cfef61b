"""What server and client agree on: encoding, names, limits, and how a connection is secured."""

from __future__ import annotations

import functools
import hmac
import ssl
from pathlib import Path
from typing import Any

import grpc
import msgspec

from dlrover.errors import ConfigurationError, ProtocolError

SERVICE = "dlrover.Master"
BRAIN_SERVICE = "dlrover.Brain"
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""No message of this protocol comes near it; a larger one is refused before it is read."""
MAX_PENDING_CALLS = 100_000
"""Calls that wait for the server to take them up; those beyond it are refused."""
TOKEN_KEY = "dlrover-token"  # noqa: S105 - the name of the metadata field, not a token
MAX_TOKEN = 4096
"""Characters of a token: headers are limited in size."""
MAX_QUOTE = 200
"""Characters of a peer's error that are passed on; an error travels in headers of limited size."""

_encoder = msgspec.msgpack.Encoder()
_decoder = functools.cache(msgspec.msgpack.Decoder)


def encode(message: msgspec.Struct) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes, kind: Any) -> Any:
    """The message of type ``kind`` in ``data``.

    Raises:
        ProtocolError: the bytes are not such a message.
    """
    try:
        return _decoder(kind).decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # What is wrong may quote the sender, at any length.
        raise ProtocolError(f"A message could not be read: {str(error)[:MAX_QUOTE]}.") from error


def checked_token(token: str) -> str:
    """``token`` itself.

    Raises:
        ConfigurationError: it cannot travel in the headers of a call.
    """
    fits = token.isascii() and token.isprintable() and token.strip() == token
    if not (fits and 1 <= len(token) <= MAX_TOKEN):
        raise ConfigurationError(
            f"The token has {len(token)} characters or holds others than printable ASCII; "
            f"1 to {MAX_TOKEN} of them are accepted, with no space at either end."
        )
    return token


def token_matches(given: object, expected: str) -> bool:
    """Compare tokens in constant time."""
    text = given if isinstance(given, str) else ""
    return hmac.compare_digest(text.encode(), expected.encode())


class Tls(msgspec.Struct, frozen=True):
    """Paths of PEM files. A server needs ``cert`` and ``key``, a client ``ca``.

    A client with ``server_name`` expects a certificate for that name, whatever the address is.
    Credentials raise `ConfigurationError` if a file is missing, or is not what it should be.
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    server_name: str = ""

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials for a server; None without TLS."""
        if not self.cert and not self.key:
            return None
        if not (self.cert and self.key):
            raise ConfigurationError(
                "TLS needs both tls_cert and tls_key; only one of them is set."
            )
        key, cert = _read("tls_key", self.key), _read("tls_cert", self.cert)
        try:
            # gRPC would only say that it cannot listen.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.cert, self.key, password=""
            )
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"tls_cert {self.cert} and tls_key {self.key} are not a PEM certificate and the "
                f"unencrypted key that belongs to it."
            ) from error
        return grpc.ssl_server_credentials([(key, cert)])

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Credentials for a client; None without TLS."""
        if not self.ca:
            return None
        ca = _read("tls_ca", self.ca)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.ca)
        except ssl.SSLError as error:
            raise ConfigurationError(f"tls_ca {self.ca} holds no PEM certificate.") from error
        return grpc.ssl_channel_credentials(ca)


def _read(field: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{field}: {path} cannot be read: {error.strerror}.") from error


CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer whose machine lost power closes no connection: ask it now and then.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Back to a restarted master within a second ...
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # ... also where its name has moved to another address meanwhile ...
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    # ... but a connection may take so long to be made: over a slow link, or while ten thousand nodes
    # connect at once.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Clients in one process do not share a connection behind their backs.
    ("grpc.use_local_subchannel_pool", 1),
    # Ten thousand nodes may call at once; gRPC by itself drops calls when 1000 are waiting.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
    # Thousands of nodes may report at once: little of each report is read ahead.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16_384),
)
