"""Socket helpers: the peer process, the local address of a route, and a thread for each connection."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

logger = logging.getLogger(__name__)

ACCEPT_PAUSE = 0.1
"""Seconds until connections are accepted again after one could not be."""
_PASSING = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.ECONNABORTED,
    errno.EINTR,
}
_CREDENTIALS = struct.Struct("3i")


class PeerProcess(NamedTuple):
    """The process at the other end of a socket."""

    pid: int
    """Pid of the process; 0 if it is not visible from here."""
    uid: int


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to another machine.

    Raises:
        OSError: the host is unknown, or there is no route to it.
    """
    family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing; only looks up the route
        return str(probe.getsockname()[0])


def loopback_problem(seconds: float) -> str:
    """Return why 127.0.0.1 cannot be reached within some seconds; empty if it can."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=seconds).close()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return ""


def send_all(sock: socket.socket, parts: Sequence[memoryview]) -> None:
    """Send bytes that lie in several places without copying them; no part may be empty."""
    waiting = list(parts)
    while waiting:
        sent = sock.sendmsg(waiting[:64])
        while waiting and sent >= waiting[0].nbytes:
            sent -= waiting.pop(0).nbytes
        if sent:
            waiting[0] = waiting[0][sent:]


def shut_down(sock: socket.socket) -> None:
    """End a connection or a listener on which another thread, which closes it, may wait."""
    with contextlib.suppress(OSError):  # it has ended already
        sock.shutdown(socket.SHUT_RDWR)


def end(sock: socket.socket) -> None:
    """Close a socket on which another thread may wait."""
    shut_down(sock)
    sock.close()


def serve_each(listener: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
    """Serve each connection in a thread of its own, until the listener is closed.

    Where this process has no file or no thread left for one, it goes on once there is.
    """
    warned, pause = False, threading.Event()  # never set
    while True:
        sock = None
        try:
            sock, _ = listener.accept()
            threading.Thread(target=serve, args=(sock,), name=name, daemon=True).start()
            warned = False
        except (OSError, RuntimeError) as error:
            if sock is not None:
                sock.close()
            elif isinstance(error, OSError) and error.errno not in _PASSING:
                return
            if not warned:
                logger.warning("Connections cannot be taken now: %s", error)
            warned = True
            pause.wait(ACCEPT_PAUSE)


def peer(sock: socket.socket) -> PeerProcess:
    """Return the process that connected a Unix socket; at the client, the one that called ``listen`` last."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return PeerProcess(pid, uid)
