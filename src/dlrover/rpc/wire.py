"""The wire format shared by server and client: encoding, names, limits and TLS."""

from __future__ import annotations

import hmac
import re
import ssl
from pathlib import Path
from typing import Any

import grpc
import msgspec

from dlrover._util import decoding
from dlrover.errors import ConfigurationError, ProtocolError, readable
from dlrover.rpc import encoding
from dlrover.spec.jobdir import TlsFiles

SERVICE = "dlrover.Master"
BRAIN_SERVICE = "dlrover.Brain"
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Maximum size of a message to a server, far above any regular one; larger ones are refused before they are read."""
MAX_REPLY_BYTES = 64 * 1024 * 1024
"""Maximum size of a server's message: it may list thousands of jobs or nodes, and each came in a message of its own."""
MAX_PENDING_CALLS = 100_000
"""Maximum calls that wait for the server; further calls are refused."""
TOKEN_KEY = "dlrover-token"  # noqa: S105 - the name of the metadata field, not a token
MAX_TOKEN = 4096
"""Maximum characters of a token: headers are limited in size."""
MAX_QUOTE = 200
"""Maximum characters quoted from a decoding error; errors travel in headers of limited size."""

MAX_NUMBER = 1e150
"""Maximum magnitude of a number with a fraction: its square is finite."""
_LARGE = (re.compile(rb"\xcb[\x5f-\x7f\xdf-\xff]"), re.compile(rb"\xca[\x7f\xff][\x80-\xff]"))
"""First bytes of larger numbers and NaN in MessagePack, with 64 and 32 bits; texts and bytes may contain them, too.
One expression for both would take five times as long."""


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message."""
    return encoding.encode(message)


def decode(data: bytes, kind: Any) -> Any:
    """Decode ``data`` as a message of type ``kind``.

    Raises:
        ProtocolError: The bytes are not such a message, or it holds NaN or a number beyond `MAX_NUMBER`.
    """
    try:
        message = decoding.msgpack_decoder(kind).decode(data)
        suspect = any(large.search(data) for large in _LARGE)
        usual = not suspect or _is_usual(msgspec.msgpack.decode(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # The error may quote the sender at any length.
        raise ProtocolError(f"A message could not be read: {str(error)[:MAX_QUOTE]}.") from error
    if not usual:
        raise ProtocolError(
            f"A message could not be read: it holds NaN or a number beyond {MAX_NUMBER:g}."
        )
    return message


def _is_usual(value: object) -> bool:
    """Return whether all floats in a message of plain values are at most `MAX_NUMBER`."""
    if isinstance(value, float):
        return abs(value) <= MAX_NUMBER  # NaN is not
    if isinstance(value, dict):
        return all(map(_is_usual, (*value, *value.values())))
    return not isinstance(value, list | tuple) or all(map(_is_usual, value))


def checked_token(token: str) -> str:
    """Return ``token`` if it is valid.

    Raises:
        ConfigurationError: The token cannot travel in the headers of a call.
    """
    fits = token.isascii() and token.isprintable() and token.strip() == token
    if not (fits and 1 <= len(token) <= MAX_TOKEN):
        raise ConfigurationError(
            f"The token has {len(token)} characters or holds others than printable ASCII; "
            f"1 to {MAX_TOKEN} of them are accepted, with no space at either end."
        )
    return token


def token_in(path: str, option: str) -> str:
    """Return the token on the first line of the file that an option names.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    with readable(f"{option} {path}"):
        text = Path(path).read_text()
    return text.strip().partition("\n")[0].strip()


def token_matches(given: object, expected: str) -> bool:
    """Return whether two tokens are equal, compared in constant time."""
    text = given if isinstance(given, str) else ""
    return hmac.compare_digest(text.encode(), expected.encode())


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials | None:
    """Return credentials for a server; None without TLS.

    Raises:
        ConfigurationError: a file is missing or invalid.
    """
    if not tls.cert and not tls.key:
        return None
    if not (tls.cert and tls.key):
        raise ConfigurationError("TLS needs both tls_cert and tls_key; only one of them is set.")
    key, cert = _read("tls_key", tls.key), _read("tls_cert", tls.cert)
    try:
        # gRPC would only report that it cannot listen.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key, password="")
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"tls_cert {tls.cert} and tls_key {tls.key} are not a PEM certificate and the "
            f"unencrypted key that belongs to it."
        ) from error
    return grpc.ssl_server_credentials([(key, cert)])


def channel_credentials(tls: TlsFiles) -> grpc.ChannelCredentials | None:
    """Return credentials for a client; None without TLS.

    Raises:
        ConfigurationError: the file is missing or invalid.
    """
    if not tls.ca:
        return None
    ca = _read("tls_ca", tls.ca)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(tls.ca)
    except ssl.SSLError as error:
        raise ConfigurationError(f"tls_ca {tls.ca} holds no PEM certificate.") from error
    return grpc.ssl_channel_credentials(ca)


def _read(field: str, path: str) -> bytes:
    with readable(f"{field}: {path}"):
        return Path(path).read_bytes()


_OPTIONS: tuple[tuple[str, int], ...] = (
    # A machine that loses power closes no connection: ping the peer at intervals.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    # Reconnect to a restarted master within a second ...
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # ... also if its name has moved to another address ...
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    # ... but allow one attempt 5 s: the link may be slow, or ten thousand nodes may connect at
    # once.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Clients in one process do not share connections implicitly.
    ("grpc.use_local_subchannel_pool", 1),
    # Ten thousand nodes may call at once; by default gRPC drops calls when 1000 are waiting.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    ("grpc.enable_http_proxy", 0),
    ("grpc.so_reuseport", 0),
    # Thousands of nodes may report at once: read little of each report ahead.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16_384),
)
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_REPLY_BYTES),
    *_OPTIONS,
)
CLIENT_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *_OPTIONS,
)
