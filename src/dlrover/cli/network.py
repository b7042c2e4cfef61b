"""Which machine is which: whether a host name is this one, and under which address others reach it."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import psutil

from dlrover.errors import ConfigurationError

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
"""Hosts by which a user says that all nodes are on this machine."""


def addresses_of(host: str) -> frozenset[str]:
    """The IP addresses of a host.

    Raises:
        ConfigurationError: the name is unknown.
    """
    return frozenset(str(address[0]) for _, address in _resolve(host, 0))


def is_this_machine(host: str) -> bool:
    """Whether one of the host's addresses belongs to an interface of this machine."""
    own = {
        address.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    return any(a in own or a.startswith("127.") for a in addresses_of(host))


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another one: where that one can reach it.

    Raises:
        ConfigurationError: the name is unknown.
    """
    found = "127.0.0.1"
    for family, target in _resolve(host, port):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: it only looks up the route
            found = str(probe.getsockname()[0])
            break
    if found.startswith("127.") and host not in LOOPBACK_NAMES:
        # Some systems resolve a machine's own name to 127.0.1.1, which other machines cannot reach.
        return _outward_address() or found
    return found


def _outward_address() -> str:
    """An IPv4 address of this machine that is not its loopback; empty if it has none."""
    for interface in psutil.net_if_addrs().values():
        for address in interface:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    return ""


def _resolve(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """The families and socket addresses of a host's port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigurationError(
            f"The master's host {host} cannot be resolved: {error.strerror}."
        ) from error
    return [(family, address) for family, _, _, _, address in found]


class HostLock:
    """Decides which of several launchers on this machine starts the master for an endpoint.

    The lock is a name in the kernel, not a file: it goes with the process that holds it.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(f"\0dlrover-master-{port}")
            self.held = True
        except OSError:
            self._socket.close()
            self.held = False

    def release(self) -> None:
        """Let another launcher start a master."""
        self._socket.close()
        self.held = False
