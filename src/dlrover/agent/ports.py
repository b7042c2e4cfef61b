"""A reserved port for the store of the next world."""

from __future__ import annotations

import contextlib
import socket


class PortReservation:
    """A reservation of a free TCP port until `release`.

    The socket is bound but does not listen: the kernel does not assign the port to another process, but
    a store that binds with ``SO_REUSEADDR`` (as PyTorch's does) may listen on it.
    """

    def __init__(self, port: int = 0) -> None:
        self._socket = _bind(port)
        self.port: int = self._socket.getsockname()[1] if self._socket is not None else port

    @property
    def held(self) -> bool:
        """True while the port is reserved; False if it was taken, or after `release`."""
        return self._socket is not None

    def release(self) -> None:
        """Release the port."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _bind(port: int) -> socket.socket | None:
    """Bind a socket to ``port`` on all addresses; return None if that fails.

    The store reports a taken port: its error reaches the user with rank and log.
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
