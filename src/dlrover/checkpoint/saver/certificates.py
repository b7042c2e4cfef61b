"""TLS between savers, and between roles; each process has a self-signed certificate whose fingerprint the others know.

No authority vouches for a certificate: its fingerprint comes with the world's plan, sealed with a secret that
the nodes have from the job's master, or from the coordinator of the roles. The names and dates in it are therefore
ignored.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import hmac
import socket
import ssl

from dlrover import extras
from dlrover._util import kernel
from dlrover.errors import ProtocolError

_BEGIN = "-----BEGIN CERTIFICATE-----"
NO_TLS = "It does not speak TLS as this job's processes do ({})."


def make() -> str:
    """Create a private key and its certificate (PEM).

    Raises:
        ConfigurationError: the package ``cryptography`` is missing.
    """
    with extras.needed("Each node of a job that uses TLS", "tls"):
        from cryptography import x509  # noqa: PLC0415 - an extra has it
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "DLRover saver")])
    now = dt.datetime.now(dt.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + dt.timedelta(days=3650))
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return (secret + certificate.public_bytes(serialization.Encoding.PEM)).decode()


def fingerprint(pem: str) -> bytes:
    """Return the SHA-256 of a certificate created by `make`."""
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem[pem.index(_BEGIN) :])).digest()


def accept(
    sock: socket.socket, pem: str, kind: type[ssl.SSLSocket] = ssl.SSLSocket
) -> ssl.SSLSocket:
    """Start TLS with a client that has connected; it needs no certificate.

    Raises:
        ProtocolError: the client does not speak TLS.
    """
    try:
        return _server(pem, kind).wrap_socket(sock, server_side=True)  # type: ignore[arg-type] # a class is hashable
    except ssl.SSLError as error:
        raise ProtocolError(NO_TLS.format(error)) from error


def connect(
    sock: socket.socket, expected: bytes, kind: type[ssl.SSLSocket] = ssl.SSLSocket
) -> ssl.SSLSocket:
    """Start TLS with the process whose certificate has the fingerprint ``expected``, and with no other.

    Raises:
        ProtocolError: the peer does not speak TLS, or shows another certificate. Nothing was sent to it.
    """
    try:
        secured = _client(kind).wrap_socket(sock)  # type: ignore[arg-type] # as above
    except ssl.SSLError as error:
        raise ProtocolError(NO_TLS.format(error)) from error
    shown = hashlib.sha256(secured.getpeercert(binary_form=True) or b"").digest()
    if not hmac.compare_digest(shown, expected):
        secured.close()
        raise ProtocolError(
            "It shows another certificate than the one that is known of it: another process has its address, or"
            " someone in between answers."
        )
    return secured


@functools.lru_cache(2)
def _server(pem: str, kind: type[ssl.SSLSocket]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sslsocket_class = kind
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    fd = kernel.memfd_create("dlrover-saver")  # certificates load from files only
    with open(fd, "w") as file:
        file.write(pem)
        file.flush()
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    return context


@functools.lru_cache(2)
def _client(kind: type[ssl.SSLSocket]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.sslsocket_class = kind
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # `connect` compares the fingerprint
    return context
