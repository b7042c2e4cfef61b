"""Connections to processes that keep weights and are stopped or gone."""

from __future__ import annotations

import socket
import threading

import pytest

from dlrover._util import handshake
from dlrover.roles.messages import Address
from dlrover.roles.runtime import memory, wire
from dlrover.roles.runtime.holding import Discard
from dlrover.roles.runtime.wire import Op

SECRET = wire.secret_of("a-token-of-tests")


def test_a_process_that_is_stopped_counts_as_gone_and_its_late_answer_is_read_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "ANSWER_TIMEOUT", 0.1)
    served: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            served.append(listening.accept()[0])
            handshake.accept(served[0], SECRET)

        thread = threading.Thread(target=accept)
        thread.start()
        address = Address("127.0.0.1", listening.getsockname()[1])
        connection = memory.HolderConnection(address, "elsewhere", SECRET)
        thread.join()
        with served[0] as stopped:
            with pytest.raises(TimeoutError):
                connection.ask(Discard("a"))
            wire.send(stopped, Op.RESULT, 0, b"late")
            with pytest.raises(OSError, match="Bad file descriptor"):
                connection.ask(Discard("b"))
