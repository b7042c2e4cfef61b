"""The listener of a process of a role: methods that fail in odd ways, and callers that take no answers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from dlrover._util import handshake
from dlrover.roles.messages import MemberPlace
from dlrover.roles.runtime import listener as listening, payload, wire
from dlrover.roles.runtime.exporting import Exports, Marked
from dlrover.roles.runtime.holding import HeldParts
from dlrover.roles.runtime.listener import CallListener
from dlrover.roles.runtime.phases import Phases
from dlrover.roles.runtime.wire import CallFrame, CallOp
from tests.waiting import until

pytestmark = pytest.mark.slow

SECRET = wire.secret_of("a-token-of-tests")


class Silent(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise ValueError("no text")


def cancel() -> None:
    raise asyncio.CancelledError


def missing() -> None:
    os.stat(os.fsdecode(b"/nowhere/\xff"))


def silent() -> None:
    raise Silent


def large() -> object:
    return np.zeros(32 << 20, np.uint8)


def one() -> int:
    return 1


@pytest.fixture
def listener() -> Iterator[CallListener]:
    exports = Exports()
    for function in (cancel, missing, silent, large, one):
        exports.add(function.__name__, function, Marked())
    made = CallListener(
        exports, "127.0.0.1", "here", SECRET, HeldParts(MemberPlace("a", 0)), Phases()
    )
    yield made
    made.close()


def connected(listener: CallListener) -> socket.socket:
    sock = wire.connect(listener.address, "here", SECRET)
    sock.settimeout(60)
    return sock


def called(sock: socket.socket, method: str) -> CallFrame:
    wire.send(sock, CallOp.CALL, 0, *payload.encode_call(method, (), {}))
    return wire.receive(sock)


@pytest.mark.parametrize(
    ("method", "why"),
    [("cancel", ""), ("missing", r"/nowhere/\udcff"), ("silent", "its text cannot be made")],
)
def test_whatever_a_method_raises_the_next_call_is_answered(
    listener: CallListener, method: str, why: str
) -> None:
    with connected(listener) as sock:
        failed = called(sock, method)
        assert failed.op is CallOp.RAISED
        assert why in msgspec.msgpack.decode(failed.head)[1]
        assert called(sock, "one").op is CallOp.RESULT


def test_a_process_that_had_no_more_files_takes_connections_again(listener: CallListener) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    first, second = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with first, second:
        first.settimeout(60)
        # The standard streams only: what other tests have left open may be closed at any time.
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            first.connect(f"\0{listener.address.local}")
            assert first.recv(1), "the kernel had a number for it already"
            second.connect(f"\0{listener.address.local}")
            second.settimeout(0.3)
            with pytest.raises(TimeoutError):  # nobody takes it
                second.recv(1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        second.settimeout(20)
        assert second.recv(1)


def test_a_caller_that_is_stopped_holds_up_others_for_a_while_only(
    listener: CallListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SEND_TIMEOUT", 1)
    with connected(listener) as stopped, connected(listener) as well:
        wire.send(stopped, CallOp.CALL, 0, *payload.encode_call("large", (), {}))
        until(lambda: listener.state().done, 60)
        assert called(well, "one").op is CallOp.RESULT
        with pytest.raises(ConnectionError):
            wire.receive(stopped)


def test_strangers_have_few_threads_and_a_process_of_the_job_is_served_beside_them(
    listener: CallListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "MAX_STRANGERS", 2)
    with contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(4):
            strangers.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            strangers[-1].settimeout(60)
            strangers[-1].connect(f"\0{listener.address.local}")
            assert len(strangers[-1].recv(64)) == handshake.NONCE
        assert [sock.recv(1) for sock in strangers[:2]] == [b"", b""], "the oldest two have ended"
        with connected(listener) as sock:
            assert called(sock, "one").op is CallOp.RESULT
        assert len(listener._strangers) <= 2


def test_a_caller_that_proves_its_secret_byte_by_byte_has_no_more_time_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake, "TIMEOUT", 0.3)
    here, there = socket.socketpair()
    over = threading.Event()

    def drip() -> None:
        for _ in range(2 * handshake.NONCE):
            there.send(b"x")
            if over.wait(0.05):
                return

    thread = threading.Thread(target=drip)
    with here, there:
        thread.start()
        with pytest.raises(TimeoutError):
            handshake.accept(here, SECRET)
        over.set()
        thread.join()
