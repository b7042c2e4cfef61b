"""Services for the test's kubelet: a listener on each cluster address that passes on to a pod."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from typing import Any

Address = tuple[str, int]


class Services:
    """Listeners of one namespace's Services."""

    def __init__(self) -> None:
        self._listeners: dict[Address, socket.socket] = {}
        self._targets: dict[Address, Address | None] = {}
        self._addresses: dict[str, str] = {}

    def update(self, services: list[dict[str, Any]], pods: list[dict[str, Any]]) -> None:
        """Take in the Services and pods that there are now."""
        self._addresses = {s["metadata"]["name"]: s["spec"]["clusterIP"] for s in services}
        for service in services:
            spec = service["spec"]
            if spec["clusterIP"] in ("None", "") or not spec.get("selector"):
                continue
            chosen = [pod for pod in pods if _matches(pod, spec["selector"])]
            for port in spec["ports"]:
                address = (spec["clusterIP"], port["port"])
                target = (
                    (chosen[-1]["status"]["podIP"], int(port["targetPort"])) if chosen else None
                )
                self._targets[address] = target
                if address not in self._listeners:
                    self._listen(address)

    def resolve(self, text: str, namespace: str) -> str:
        """``text`` with addresses in place of Services' names."""
        for name, address in self._addresses.items():
            pattern = rf"(?<![\w.-]){re.escape(name)}\.{re.escape(namespace)}(\.svc(\.cluster\.local)?)?(?![\w.-])"
            text = re.sub(pattern, address, text)
        return text

    def close(self) -> None:
        for listener in self._listeners.values():
            _close(listener)

    def _listen(self, address: Address) -> None:
        listener = socket.create_server(address)
        self._listeners[address] = listener
        threading.Thread(target=self._accept, args=(listener, address), daemon=True).start()

    def _accept(self, listener: socket.socket, address: Address) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                target = self._targets.get(address)
                try:
                    assert target is not None
                    server = socket.create_connection(target, timeout=5)
                    server.settimeout(None)
                except (OSError, AssertionError):
                    client.close()
                    continue
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _matches(pod: dict[str, Any], selector: dict[str, str]) -> bool:
    status, metadata = pod.get("status", {}), pod["metadata"]
    labels = metadata.get("labels") or {}
    runs = status.get("phase") == "Running" and status.get("podIP")
    return bool(runs) and all(labels.get(key) == value for key, value in selector.items())


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    _close(source)
    _close(sink)


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
