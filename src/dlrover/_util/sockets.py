"""Unix sockets."""

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


def peer(sock: socket.socket) -> Peer:
    """Who connected a Unix socket; for the one that connected, who called ``listen`` last."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return Peer(pid, uid)
