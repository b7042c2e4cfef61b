"""Which machine is which."""

from __future__ import annotations

import socket

import pytest

from dlrover.cli.host import network


@pytest.mark.parametrize(
    ("addresses", "listens"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["::1", "127.0.0.1"], "127.0.0.1"),
        (["127.0.1.1"], "127.0.1.1"),
        (["::1"], "::1"),
        (["0.0.0.0"], "127.0.0.1"),
        (["10.0.0.1"], ""),
        (["127.0.0.1", "10.0.0.1"], ""),
    ],
)
def test_where_nodes_of_one_machine_meet(
    addresses: list[str], listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, 0)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert network.loopback_of("host") == listens


NOWHERE = "192.0.2.1"
"""An address that belongs to no machine (RFC 5737)."""


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is called as a pod with a subdomain is."""
    full = "digits-node-0-0.digits.default.svc.cluster.local"
    monkeypatch.setattr(socket, "gethostname", lambda: "digits-node-0-0")
    monkeypatch.setattr(socket, "getfqdn", lambda _: full)


@pytest.mark.usefixtures("pod")
@pytest.mark.parametrize(
    "host",
    [
        "digits-node-0-0",
        "digits-node-0-0.digits",
        "digits-node-0-0.digits.default",
        "digits-node-0-0.digits.default.svc.cluster.local",
    ],
)
def test_a_machine_knows_its_own_name_before_dns_does(host: str) -> None:
    assert network.is_this_machine(host)


@pytest.mark.usefixtures("pod")
@pytest.mark.parametrize(
    "host", ["digits-node-0", "digits-node-0-1.digits", "digits-node-0-0.dig", "digits-node-0-0.x"]
)
def test_another_name_is_judged_by_its_address(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    address = NOWHERE

    def resolve(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert not network.is_this_machine(host)
    address = "127.0.0.2"
    assert network.is_this_machine(host)
