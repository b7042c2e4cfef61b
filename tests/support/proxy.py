"""A TCP proxy between a client and a server that cuts and stalls connections."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Passes connections on to ``port`` of this machine."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._stalled = threading.Event()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def cut(self) -> None:
        """End all connections."""
        for one in self._sockets:
            _shut(one)

    def stall(self) -> None:
        """Pass nothing on any more on the connections that there are; new ones are served."""
        self._stalled.set()
        self._stalled = threading.Event()

    def close(self) -> None:
        _shut(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join()
        for one in [self._listener, *self._sockets]:
            one.close()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket()
                self._sockets += [client, server]
                try:
                    server.connect(("127.0.0.1", self._target))
                except OSError:
                    _shut(client)
                    continue
                for source, sink in ((client, server), (server, client)):
                    self._start(_pump, source, sink, self._stalled)


def _pump(source: socket.socket, sink: socket.socket, stalled: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            if not stalled.is_set():
                sink.sendall(data)
    if not stalled.is_set():
        _shut(source)
        _shut(sink)


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
