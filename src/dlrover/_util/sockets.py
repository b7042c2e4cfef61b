"""Sockets: who is at the other end, and by which way."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

_CREDENTIALS = struct.Struct("3i")


class Peer(NamedTuple):
    """The process at the other end."""

    pid: int
    """0 if it is not to be seen from here."""
    uid: int


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another one.

    Raises:
        OSError: the host is unknown, or no way leads there.
    """
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing: it only looks up the route
        return str(probe.getsockname()[0])


def peer(sock: socket.socket) -> Peer:
    """Who connected a Unix socket; for the one that connected, who called ``listen`` last."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return Peer(pid, uid)
