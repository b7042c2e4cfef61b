"""An HTTP proxy before the API server that refuses, fails, and loses answers, by chance."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import ssl
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOP_BY_HOP = ("connection", "content-length", "transfer-encoding", "host")
TIMEOUT = 90.0
"""Seconds; longer than a watch."""


class FaultyServer:
    """Passes requests on to ``port`` of this machine; about every second one goes wrong.

    Each kind of fault comes as often as another: 429 and 503 before anything is done, 409 to who changes an
    object or makes a pod, and a connection that is closed after the request was carried out. Watches are left alone.
    """

    def __init__(self, port: int, seed: int) -> None:
        self.faults: Counter[str] = Counter()
        self._target = port
        self._chance = random.Random(seed)
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _fault(self, method: str, path: str) -> str:
        if "watch=true" in path:
            return ""
        conflicts = method in ("PATCH", "PUT") or (method == "POST" and path.endswith("/pods"))
        kinds = ["429", "503", "lost", *(["409"] if conflicts else [])]
        with self._lock:
            kind = self._chance.choice([*kinds, *[""] * len(kinds)])
            self.faults[kind] += 1
        return kind

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                kind = server._fault(self.command, self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if kind in ("429", "503", "409"):
                    self._refuse(int(kind))
                    return
                with contextlib.suppress(OSError, http.client.HTTPException):
                    self._pass_on(body, lost=kind == "lost")

            do_POST = do_PATCH = do_PUT = do_DELETE = do_GET  # noqa: N815

            def _refuse(self, status: int) -> None:
                reasons = {429: "TooManyRequests", 503: "ServiceUnavailable", 409: "Conflict"}
                answer = {"kind": "Status", "code": status, "reason": reasons[status]}
                self._answer(status, json.dumps({**answer, "message": "By chance."}).encode())

            def _answer(self, status: int, body: bytes) -> None:
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def _pass_on(self, body: bytes, *, lost: bool) -> None:
                insecure = ssl._create_unverified_context()
                target = http.client.HTTPSConnection(
                    "127.0.0.1", server._target, timeout=TIMEOUT, context=insecure
                )
                kept = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
                with contextlib.closing(target):
                    target.request(self.command, self.path, body or None, kept)
                    answer = target.getresponse()
                    if lost:
                        answer.read()
                        self.connection.shutdown(socket.SHUT_RDWR)
                        return
                    self.send_response(answer.status)
                    self.send_header("Content-Type", answer.headers.get("Content-Type", ""))
                    self.end_headers()  # the body ends with the connection
                    while piece := answer.read1(1 << 16):
                        self.wfile.write(piece)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
