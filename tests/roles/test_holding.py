"""Connections to processes that keep weights and are stopped or gone."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from dlrover._util import cgroup, handshake
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.roles.messages import CallAddress, JobView, MemberPlace
from dlrover.roles.runtime import memory, wire
from dlrover.roles.runtime.holding import CommitPart, DiscardPart, HeldParts, ReservePart
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


def test_memory_that_does_not_fit_is_refused_and_unused_memory_given_back_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holding = HeldParts(MemberPlace("trainer", 0, 1))
    session, mib = holding.session(), 1 << 20
    monkeypatch.setattr(cgroup, "available", lambda: 10 * mib - holding.memory)
    session.handle(ReservePart("a", 6 * mib))
    refused = "^The weights need 5 MiB more memory, and 4 MiB are available: give the machine or"
    with pytest.raises(InfrastructureError, match=refused):
        session.handle(ReservePart("b", 5 * mib))
    session.handle(CommitPart("a", 0, 0, 0))
    session.handle(DiscardPart("a"))
    assert holding.memory == 6 * mib
    _, fd, _ = session.handle(ReservePart("b", 9 * mib))
    assert os.fstat(fd).st_size == holding.memory == 9 * mib
    with pytest.raises(ConfigurationError, match="The part b of weights is here already"):
        session.handle(ReservePart("b", 1))
    os.close(fd)


def test_others_use_their_memory_while_more_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    holding = HeldParts(MemberPlace("trainer", 0, 1))
    session, done = holding.session(), []

    def allocate(fd: int, offset: int, size: int) -> None:
        thread = threading.Thread(target=lambda: (holding.follow(JobView()), done.append(1)))
        thread.start()
        thread.join(10)
        os.ftruncate(fd, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    _, fd, _ = session.handle(ReservePart("a", 10))
    assert done
    os.close(fd)
