"""A port held free for the store of the next world."""

from __future__ import annotations

import contextlib
import socket


class PortReservation:
    """Holds a free TCP port until `release`.

    The socket is bound but does not listen: the kernel gives the port to nobody else by itself, while
    a store that binds with ``SO_REUSEADDR`` (PyTorch's does) may listen on it.
    """

    def __init__(self, port: int = 0) -> None:
        self._socket = _bind(port)
        self.port: int = self._socket.getsockname()[1] if self._socket is not None else port

    @property
    def held(self) -> bool:
        """Whether the port was free and is held."""
        return self._socket is not None

    def release(self) -> None:
        """Let go of the port."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _bind(port: int) -> socket.socket | None:
    """A bound socket on all addresses; None if ``port`` was asked for and is taken.

    A taken port is the store's to report: its error reaches the user with rank and log.
    """
    for family in (socket.AF_INET6, socket.AF_INET):
        with contextlib.suppress(OSError):
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind(("", port))
            except OSError:
                sock.close()
                raise
            return sock
    return None
