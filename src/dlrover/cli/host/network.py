"""Host names and addresses: find out which are this machine's, and under which one others reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import sys
import threading
import time
from typing import Any

import psutil

from dlrover.errors import InfrastructureError

_UNSPECIFIED = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - addresses that users give
"""Unspecified addresses, with the own machine's address that connecting to them reaches."""

NAME_RETRY = 0.5
"""Seconds between two look-ups of an unknown name."""
NAME_NOTICE = 2.0
"""Seconds of waiting for a name after which a notice is printed."""


def wait_for_name(host: str, limit: float) -> None:
    """Wait until the master's host name can be resolved: its pod may start later.

    Raises:
        InfrastructureError: the name is still unknown after ``limit`` seconds.
    """
    began = time.monotonic()
    noticed = False
    while fault := _why_unknown(host):
        waited = time.monotonic() - began
        if waited + NAME_RETRY > limit:
            raise InfrastructureError(
                f"The master's host {host} cannot be resolved: {fault}, for {limit:g} s "
                "(connect_timeout)."
            )
        if not noticed and waited > NAME_NOTICE:
            noticed = True
            print(
                f"dlrover-run: waiting up to {limit:g} s (connect_timeout) for the master's host: "
                f"the name {host} is not known yet.",
                file=sys.stderr,
                flush=True,
            )
        threading.Event().wait(NAME_RETRY)


def _why_unknown(host: str) -> str:
    """Return why a name has no address; empty if it has one."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def addresses_of(host: str) -> frozenset[str]:
    """Return the IP addresses of a host.

    Raises:
        InfrastructureError: the name is unknown.
    """
    return frozenset(str(address[0]) for _, address in _resolve(host, 0))


def is_this_machine(host: str) -> bool:
    """Return True if ``host`` is a name of this machine, or an address of it is on an interface here.

    The name counts even if it resolves to an address that is not this machine's, or to that of an
    earlier pod.

    Raises:
        InfrastructureError: the name is unknown.
    """
    return _is_own_name(host) or any(_own_addresses(host).values())


def _is_own_name(host: str) -> bool:
    """Return True if ``host`` is the host name, or the full name or its part before a dot."""
    name = socket.gethostname()
    return host == name or f"{socket.getfqdn(name)}.".startswith(f"{host}.")


def stays_here(host: str) -> bool:
    """Return True if all connections from here to ``host`` stay on this machine."""
    try:
        return all(_own_addresses(host).values())
    except InfrastructureError:  # an unknown name
        return False


def _own_addresses(host: str) -> dict[str, bool]:
    """Return the addresses of a host; the value is True for an address of this machine."""
    own = {
        address.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }
    return {a: a in own or _is_loopback(a) for a in addresses_of(host)}


def is_loopback(host: str) -> bool:
    """Return True if this host, as the user gave it, puts all nodes on this machine."""
    return host.lower() == "localhost" or _is_loopback(host)


def _is_loopback(address: str) -> bool:
    try:
        return address in _UNSPECIFIED or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def loopback_of(host: str) -> str:
    """Return the address to listen on for connections to ``host``; empty unless it is a loopback address.

    Raises:
        InfrastructureError: the name is unknown.
    """
    addresses = sorted(addresses_of(host), key=lambda address: (":" in address, address))
    if not all(map(_is_loopback, addresses)):
        return ""
    return _UNSPECIFIED.get(addresses[0], addresses[0])


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to ``host``, where that machine can reach it.

    Raises:
        InfrastructureError: the name is unknown.
    """
    found = "127.0.0.1"
    for family, target in _resolve(host, port):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing: it only looks up the route
            found = str(probe.getsockname()[0])
            break
    if found.startswith("127.") and not is_loopback(host):
        # Some systems resolve a machine's own name to 127.0.1.1, which other machines cannot reach.
        return _outward_address() or found
    return found


def _outward_address() -> str:
    """Return an IPv4 address of this machine other than its loopback; empty if there is none."""
    for interface in psutil.net_if_addrs().values():
        for address in interface:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                return str(address.address)
    return ""


def _resolve(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return the address families and socket addresses of a host's port."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise InfrastructureError(
            f"The master's host {host} cannot be resolved: {error.strerror}."
        ) from error
    return [(family, address) for family, _, _, _, address in found]


class HostLock:
    """Lock that decides which launcher on this machine starts the master for an endpoint.

    The lock is a name in the kernel, not a file: it vanishes with the process that holds it.
    """

    def __init__(self, port: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.bind(f"\0dlrover-master-{port}")
            self.held = True
        except OSError:
            self._socket.close()
            self.held = False
