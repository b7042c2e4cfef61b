"""Connections to processes that keep weights and are stopped or gone."""

from __future__ import annotations

import socket
import threading

import pytest

from dlrover._util import handshake
from dlrover.roles.messages import CallAddress
from dlrover.roles.runtime import memory, wire
from dlrover.roles.runtime.holding import DiscardPart
from dlrover.roles.runtime.wire import CallOp

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
        address = CallAddress("127.0.0.1", listening.getsockname()[1])
        connection = memory.HolderConnection(address, "elsewhere", SECRET)
        thread.join()
        with served[0] as stopped:
            with pytest.raises(TimeoutError):
                connection.ask(DiscardPart("a"))
            wire.send(stopped, CallOp.RESULT, 0, b"late")
            with pytest.raises(OSError, match="Bad file descriptor"):
                connection.ask(DiscardPart("b"))
