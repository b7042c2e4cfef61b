"""The port for the store of the next world."""

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


class StorePort:
    """The port that a node offers for the store of the next world: ``wanted``, or a free one if that is 0."""

    def __init__(self, wanted: int) -> None:
        self._wanted = wanted
        self._reservation: PortReservation | None = None
        self._used = False

    def reserve(self) -> int:
        """Return a reserved port: the same one until `use`."""
        if self._used:
            self.close()
        if self._reservation is None:
            self._reservation = PortReservation(self._wanted)
            self._used = False
        return self._reservation.port

    def close(self) -> None:
        """Release the port."""
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def use(self) -> None:
        """Note that workers start, whose store may take the port."""
        self._used = True


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
