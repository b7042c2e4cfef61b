"""A reserved port stays free for a store, and goes to nobody else."""

import socket

import pytest

from dlrover.agent.ports import PortReservation, StorePort


def bind(port: int, *, reuse: bool) -> socket.socket:
    sock = socket.socket(socket.AF_INET6)
    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    if reuse:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("", port))
        sock.listen()
    except OSError:
        sock.close()
        raise
    return sock


def test_a_store_may_listen_on_it_and_others_may_not():
    reservation = PortReservation()
    with pytest.raises(OSError, match="in use"):
        bind(reservation.port, reuse=False)
    bind(reservation.port, reuse=True).close()
    reservation.release()
    reservation.release()


def test_the_kernel_gives_a_reserved_port_to_nobody():
    reservations = [PortReservation() for _ in range(50)]
    ports = {r.port for r in reservations}
    others = [bind(0, reuse=True) for _ in range(200)]
    assert len(ports) == 50
    assert not ports & {s.getsockname()[1] for s in others}
    for sock in others:
        sock.close()
    for reservation in reservations:
        reservation.release()


def test_a_taken_port_is_left_to_the_store_to_report():
    with bind(0, reuse=False) as taken:
        port = taken.getsockname()[1]
        reservation = PortReservation(port)
        assert reservation.port == port
        reservation.release()


@pytest.mark.torch
@pytest.mark.slow
def test_torchs_store_listens_on_a_reserved_port():
    from torch.distributed import TCPStore

    reservation = PortReservation()
    store = TCPStore("127.0.0.1", reservation.port, is_master=True, wait_for_workers=False)
    store.set("key", "value")
    assert store.get("key") == b"value"
    reservation.release()


def test_a_node_offers_another_port_once_its_workers_may_use_the_last_one() -> None:
    port = StorePort(0)
    first = port.reserve()
    assert port.reserve() == first
    port.use()
    second = port.reserve()
    bind(first, reuse=False).close()
    assert port.reserve() == second
    port.close()
    bind(second, reuse=False).close()
    port.close()
