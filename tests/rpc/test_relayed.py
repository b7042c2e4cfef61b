"""A worker's requests by way of its agent: whose reply is whose."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

import pytest

from dlrover._util import framing
from dlrover.rpc import encoding
from dlrover.rpc.relayed import RelayedMaster
from dlrover.spec.requests import Unanswered
from dlrover.spec.requests.shards import LookShards


@pytest.fixture
def agent():
    """The address of an agent that answers with the bytes of the request in hex."""
    address = f"dlrover-test-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{address}")
    listener.listen()

    def serve(sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionError):
            while True:
                request = framing.receive(sock.recv_into).hex()
                sock.sendall(framing.pack(encoding.encode(Unanswered(away=request))))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with listener:
        yield address
        listener.shutdown(socket.SHUT_RDWR)


def echo(name: str) -> Unanswered:
    return Unanswered(away=encoding.encode(LookShards(name)).hex())


def test_a_request_after_one_that_was_interrupted_gets_its_own_reply(agent, monkeypatch):
    receive = framing.receive

    def interrupted(fill, most=framing.MAX_FRAME):
        if threading.current_thread() is not threading.main_thread():
            return receive(fill, most)
        monkeypatch.setattr(framing, "receive", receive)
        raise KeyboardInterrupt

    with contextlib.closing(RelayedMaster(agent)) as master:
        assert master.ask(LookShards("one")) == echo("one")
        monkeypatch.setattr(framing, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            master.ask(LookShards("two"))
        assert master.ask(LookShards("three")) == echo("three")
