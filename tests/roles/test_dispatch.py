"""Calls to members that are not what the job says they are: unreachable, stopped, busy, or with answers that are damaged."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrover._util import handshake
from dlrover.errors import ConfigurationError, MemberLostError, ProtocolError
from dlrover.roles import RoleGroup, current_worker, weights
from dlrover.roles.messages import CallAddress, JoinRole, MemberEnded, MemberPlace, UseVersion
from dlrover.roles.runtime import calls, payload, wire
from dlrover.roles.runtime.wire import CallFrame, CallOp
from tests.roles.coordinators import TOKEN, Coordinator, coordinator, joined
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

ROLLOUT = MemberPlace("rollout", 0, 1)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Coordinator]:
    with coordinator(tmp_path, secured=False) as made, joined(made, "driver"):
        yield made


Answer = Callable[[socket.socket, CallFrame], None]


@pytest.fixture
def member(job: Coordinator) -> Iterator[Callable[[Answer], list[CallFrame]]]:
    """Makes a member of which the test decides how it answers; returns the calls that it gets."""
    listening = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def made(answer: Answer) -> list[CallFrame]:
        got: list[CallFrame] = []

        def answer_all(sock: socket.socket) -> None:
            with sock, suppress(ConnectionError):
                handshake.accept(sock, wire.secret_of(TOKEN))
                while True:
                    got.append(wire.receive(sock))
                    answer(sock, got[-1])

        def serve() -> None:
            with suppress(OSError):  # the test is over
                while True:
                    answer_all(listening.accept()[0])

        threads.append(threading.Thread(target=serve))
        threads[0].start()
        join(job, listening.getsockname()[1], "ask")
        return got

    yield made
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    job.run(lambda: job.service.tell(MemberEnded(ROLLOUT, "the test is over")))
    for thread in threads:
        thread.join(60)


def join(job: Coordinator, port: int, *methods: str) -> None:
    event = JoinRole(ROLLOUT, CallAddress("127.0.0.1", port), dict.fromkeys(methods, True))
    job.run(lambda: job.service._submit(event))


def test_a_call_of_a_member_that_cannot_be_reached_waits_no_longer_than_it_says(
    job: Coordinator,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    join(job, port, "ask")
    with pytest.raises(MemberLostError, match="ask waited 1 s for rollout 0: rollout 0 serves"):
        RoleGroup("rollout", wait=1.0).call_rank0("ask").result(60)


def test_a_call_of_all_members_does_not_wait_for_one_that_the_role_has_no_longer(
    job: Coordinator,
) -> None:
    for place, instances in ((ROLLOUT, 2), (MemberPlace("rollout", 0, 2), 1)):
        if instances == 1:
            called = RoleGroup("rollout", wait=100).call("ask")
            until(lambda: len(current_worker().calls._waiting) == 2, 10)
        event = JoinRole(place, CallAddress("127.0.0.1", 1), {"ask": True}, instances=instances)
        job.run(lambda event=event: job.service._submit(event))
    left = "^rollout 1 has left: the role has 1 member now, and ask waits no more.$"
    with pytest.raises(MemberLostError, match=left):
        called.futures[1].result(10)
    assert not called.futures[0].done()


def test_a_call_of_a_script_that_was_started_again_waits_until_it_exports_its_methods(
    job: Coordinator, member: Callable[[Answer], list[CallFrame]]
) -> None:
    join(job, 1)
    group, head = RoleGroup("rollout", wait=30), payload.encode([7])[0]
    called = [group.call_rank0("ask"), group.call_batch("ask", 1, [1]).futures[0]]
    with pytest.raises(
        MemberLostError, match=r"ask waited 0 s.*: rollout 0 exports no methods yet"
    ):
        RoleGroup("rollout", wait=0.1).call_rank0("ask").result(60)
    member(lambda sock, call: wire.send(sock, CallOp.RESULT, call.call, head))
    assert [one.result(60) for one in called] == [[7], [7]]


def test_a_call_says_once_what_it_waits_for(
    job: Coordinator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(calls, "WARN_AFTER", 0.2)
    join(job, 1, "ask")
    job.run(lambda: job.service._submit(UseVersion(ROLLOUT, "weights", None)))
    weights.publish({"a": np.zeros(3)}, 1)
    group = RoleGroup("rollout", wait=3.0)
    batch = group.call_batch("ask", 2, ["a", "b"], _chunk=1)
    time.sleep(0.1)
    later = group.call_member(7, "ask")  # the look at the first is due before it is this one's turn
    until(lambda: len(caplog.messages) == 2)
    for call in (batch, later):
        with pytest.raises(MemberLostError, match="ask waited 3 s"):
            call.result(60)
    assert caplog.messages == [
        "ask waits for a member of rollout that serves: rollout 0 has not the current weights; no part of a batch goes to"
        " one that has not loaded them by itself. At most 3 s.",
        "ask waits for rollout 7: rollout 0 has not the current weights. At most 3 s.",
    ]


def test_an_idempotent_call_is_made_again_though_the_job_noticed_the_end_before_the_caller(
    job: Coordinator, member: Callable[[Answer], list[CallFrame]]
) -> None:
    got = member(lambda sock, call: None)  # as one that is stopped
    called = RoleGroup("rollout", wait=0.5).call_rank0("ask")
    until(lambda: got, 60)
    job.run(lambda: job.service._submit(MemberEnded(ROLLOUT, "stopped")))
    with pytest.raises(MemberLostError, match=r"ask waited 0 s for rollout 0: .*stopped"):
        called.result(60)


def test_an_answer_that_cannot_be_read_fails_its_own_call_only(
    member: Callable[[Answer], list[CallFrame]],
) -> None:
    heads = [b"\x91" * 100_000 + b"\x01", payload.encode([1])[0]]  # the first is nested too deep
    member(lambda sock, call: wire.send(sock, CallOp.RESULT, call.call, heads.pop(0)))
    group = RoleGroup("rollout", wait=30)
    with pytest.raises(ProtocolError, match="rollout 0: ask: its answer cannot be read"):
        group.call_rank0("ask").result(60)
    assert group.call_rank0("ask").result(60) == [1]


def test_an_interrupt_of_the_thread_that_calls_leaves_no_half_of_a_call(
    member: Callable[[Answer], list[CallFrame]], monkeypatch: pytest.MonkeyPatch
) -> None:
    send, head = wire.send, payload.encode(7)[0]

    def interrupted(sock: socket.socket, op: CallOp, *rest: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        send(sock, op, *rest)

    group = RoleGroup("rollout", wait=30)
    member(lambda sock, call: send(sock, CallOp.RESULT, call.call, head))
    assert group.call_rank0("ask").result(60) == 7
    monkeypatch.setattr(wire, "send", interrupted)
    assert group.call_rank0("ask").result(60) == 7


@pytest.mark.parametrize("thread", ["roles-from", "roles-to"])
def test_a_call_waits_until_there_is_a_thread_for_it(
    member: Callable[[Answer], list[CallFrame]], monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    start, head, short = threading.Thread.start, payload.encode(7)[0], [thread]

    def refused(self: threading.Thread) -> None:
        if short and self.name.startswith(short[0]):
            short.clear()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)
    member(lambda sock, call: wire.send(sock, CallOp.RESULT, call.call, head))
    assert RoleGroup("rollout", wait=30).call_rank0("ask").result(60) == 7
    assert not short


def test_what_follows_a_failed_call_may_call_again(
    member: Callable[[Answer], list[CallFrame]],
) -> None:
    head = payload.encode(7)[0]
    group = RoleGroup("rollout", wait=30)
    again, failed = [], threading.Event()

    def follow(_: object) -> None:
        again.append(group.call_rank0("ask"))
        failed.set()

    future = group.call_rank0("ask_nobody")
    future.add_done_callback(follow)
    member(lambda sock, call: wire.send(sock, CallOp.RESULT, call.call, head))
    with pytest.raises(ConfigurationError, match="rollout has no method ask_nobody; it has ask"):
        future.result(60)
    assert failed.wait(60)
    assert again[0].result(60) == 7


def test_a_part_of_a_batch_that_waits_for_its_turn_does_not_wait_in_vain(
    member: Callable[[Answer], list[CallFrame]],
) -> None:
    released, head = threading.Event(), payload.encode([7])[0]

    def answer(sock: socket.socket, call: CallFrame) -> None:
        assert released.wait(60)
        wire.send(sock, CallOp.RESULT, call.call, head)

    got = member(answer)
    batch = RoleGroup("rollout", wait=600).call_batch("ask", 2, [1, 2], _chunk=1)
    until(lambda: got, 60)
    calls = current_worker().calls
    (waiting,) = calls._waiting["rollout", -1]
    waiting.since -= 1000  # as after many minutes
    calls._look_at_waiting()
    assert not waiting.future.done()
    released.set()
    assert batch.result(60) == [7, 7]


def test_a_call_that_fails_after_the_end_of_the_link_is_not_tried_again(job: Coordinator) -> None:
    """The connections' threads may end later than the link, which has the loop for a second try."""
    link = current_worker().link
    link.close()
    link.later(0.0, lambda: pytest.fail("the link is closed"))
