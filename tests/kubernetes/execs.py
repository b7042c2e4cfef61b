"""The port of the test's kubelet for the API server: commands in containers (``/exec``), and ``/containerLogs``."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO
from urllib.parse import parse_qs, urlsplit

from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection

from tests.kubernetes.containers import Container

_MAGIC = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""Of RFC 6455."""

Find = Callable[[str, str], Container]
"""A container, by the names of its pod and its own; raises `LookupError`."""
LOOK = 0.05
"""Seconds between two looks at a log that is followed."""


class Execs(ThreadingHTTPServer):
    """The kubelet's own port, with the API server's certificate: that one does not check it."""

    daemon_threads = True

    def __init__(self, certificates: Path, find: Find) -> None:
        super().__init__(("127.0.0.1", 0), _Exec)
        self.find, self.closing = find, False
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / "apiserver.crt", certificates / "apiserver.key")
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.port: int = self.server_address[1]
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.closing = True
        self.shutdown()
        self.server_close()


class _Exec(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Execs

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        _, kind, _, pod, name = url.path.split("/")
        query = parse_qs(url.query)
        try:
            container = self.server.find(pod, name)
        except LookupError:
            self.send_error(404)
            return
        if kind == "containerLogs":
            self._send_log(container, int(query["tailLines"][0]))
        else:
            self._execute(container, query["command"])

    def _send_log(self, container: Container, lines: int) -> None:
        """Send the end of a log, and what is added to it until its container ends."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with container.log.open("rb") as log, contextlib.suppress(OSError):  # nobody listens
            data = b"".join(log.read().splitlines(keepends=True)[-lines:])
            while not self.server.closing:
                over = container.ended is not None
                data += log.read()
                if data:
                    self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
                    data = b""
                elif over:
                    self.wfile.write(b"0\r\n\r\n")
                    return
                else:
                    time.sleep(LOOK)
        self.close_connection = True

    def _execute(self, container: Container, command: list[str]) -> None:
        self._accept()
        self._connection, self._writing = Connection(ConnectionType.SERVER), threading.Lock()
        for channel in range(4):
            self._write(channel, b"")
        process = container.execute(command)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        threads = [
            threading.Thread(target=self._feed, args=(process.stdin,), daemon=True),
            threading.Thread(target=self._pump, args=(1, process.stdout)),
            threading.Thread(target=self._pump, args=(2, process.stderr)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads[1:]:
            thread.join()
        code = process.wait()
        failed = {"status": "Failure", "message": f"command terminated with exit code {code}"}
        self._write(3, json.dumps(failed if code else {"status": "Success"}).encode())
        self.close_connection = True

    def _accept(self) -> None:
        key = self.headers["Sec-WebSocket-Key"] + _MAGIC
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", accept)
        self.send_header("Sec-WebSocket-Protocol", self.headers["Sec-WebSocket-Protocol"])
        self.end_headers()

    def _feed(self, stdin: IO[bytes]) -> None:
        """Pass on what comes as the process's standard input, which ends with the connection."""
        with contextlib.suppress(OSError), stdin:
            while data := self.connection.recv(65536):
                self._connection.receive_data(data)
                for event in self._connection.events():
                    if isinstance(event, CloseConnection):
                        return
                    assert isinstance(event, BytesMessage)
                    assert event.data[0] == 0
                    stdin.write(event.data[1:])
                    stdin.flush()

    def _pump(self, channel: int, stream: IO[bytes]) -> None:
        with stream:
            while data := os.read(stream.fileno(), 65536):
                self._write(channel, data)

    def _write(self, channel: int, data: bytes) -> None:
        with self._writing, contextlib.suppress(OSError):  # nobody listens any more
            self.wfile.write(self._connection.send(BytesMessage(bytes([channel]) + data)))

    def log_message(self, *_: object) -> None:
        pass
