"""Proof of a shared secret at both ends of a new connection, before either reads anything else from the other."""

from __future__ import annotations

import hmac
import secrets
import socket
import time

from dlrover._util import framing

NONCE = 32
"""Bytes of a challenge, and of a proof."""
TIMEOUT = 10.0
"""Seconds that a peer has to prove that it knows the secret, all in all."""


def accept(sock: socket.socket, secret: bytes) -> bool:
    """Return whether the client knows the secret, and prove the same to it.

    Raises:
        OSError: The client does not answer in time, or is gone.
    """
    sock.settimeout(TIMEOUT)
    nonce = secrets.token_bytes(NONCE)
    sock.sendall(nonce)
    answer = _exactly(sock, 2 * NONCE, time.monotonic() + TIMEOUT)
    proof, challenge = answer[:NONCE], answer[NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"client", nonce, challenge)):
        return False
    sock.sendall(_proof(secret, b"server", nonce, challenge))
    sock.settimeout(None)
    if sock.family != socket.AF_UNIX:  # a machine that loses power closes nothing
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return True


def offer(sock: socket.socket, secret: bytes) -> bool:
    """Prove to a server that this client knows the secret; return whether the server does.

    The socket's time-out, or `TIMEOUT` without one, is that of the whole. The socket is closed if the server does not
    know the secret, or if this fails.

    Raises:
        OSError: The server does not answer in time, or is gone.
    """
    try:
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        timeout = sock.gettimeout()
        until = time.monotonic() + (TIMEOUT if timeout is None else timeout)
        nonce = _exactly(sock, NONCE, until)
        challenge = secrets.token_bytes(NONCE)
        sock.sendall(_proof(secret, b"client", nonce, challenge) + challenge)
        proof = _proof(secret, b"server", nonce, challenge)
        known = hmac.compare_digest(_exactly(sock, NONCE, until), proof)
        sock.settimeout(timeout)
    except BaseException:
        sock.close()
        raise
    if not known:
        sock.close()
    return known


def _proof(secret: bytes, side: bytes, nonce: bytes, challenge: bytes) -> bytes:
    return hmac.digest(secret, side + nonce + challenge, "sha256")


def _exactly(sock: socket.socket, count: int, until: float) -> bytes:
    def read(view: memoryview) -> int:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the peer has not proved in time that it knows the secret")
        sock.settimeout(left)
        return sock.recv_into(view)

    data = bytearray(count)
    framing.fill(memoryview(data), read)
    return bytes(data)
