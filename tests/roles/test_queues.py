"""Queues between processes of roles that are killed, and a coordinator that is replaced."""

from __future__ import annotations

import asyncio
import dis
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from dlrover import launched
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.roles import Queue, current_worker
from dlrover.roles.messages import RoleReply, RoleRequest
from dlrover.roles.runtime import link, worker
from tests.roles.coordinators import Coordinator, coordinator, joined
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAM = """
import os, signal, sys
from dlrover.roles import Queue, current_worker
from dlrover.roles.messages import RoleReply, RoleRequest

me = current_worker()
prompts, samples = Queue("prompts", 8), Queue("samples", 500)
if me.role == "producer":
    for number in range(me.cursor or 0, 60):
        if number == 20 and me.attempt == 1:
            prompts.put(number, cursor=number + 1)
            os.kill(os.getpid(), signal.SIGKILL)
        prompts.put(number, cursor=number + 1)
else:
    while True:
        batch = prompts.get(2, timeout=60)
        samples.put(*(10 * prompt for prompt in batch))
        if me.attempt == 1 and batch.numbers[0] > 10:
            os.kill(os.getpid(), signal.SIGKILL)
        prompts.ack(batch)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Coordinator]:
    with coordinator(tmp_path) as made:
        made.write("program.py", PROGRAM)
        yield made


def test_each_item_is_done_once_whoever_dies(job: Coordinator) -> None:
    program = str(job.directory.path / "program.py")
    job.launch("producer", 0, program)
    job.launch("consumer", 0, program)
    for role in ("producer", "consumer"):
        job.lost(role, until(lambda role=role: job.dead(role), 60)[0])
        job.again(role, 0)
    with joined(job, "main"):
        samples, prompts = Queue("samples", 500), Queue("prompts", 8)
        until(lambda: samples.status().added > 30, 60)
        job.restart()
        until(lambda: prompts.status().done == 60, 60)
        status = prompts.status()
        assert (status.added, status.waiting, status.leased, status.redelivered) == (60, 0, 0, 2)
        got = samples.get(samples.status().waiting)
        assert set(got) == {10 * number for number in range(60)}, "none is lost"
        assert len(got) == 62, "what was not acknowledged was done again, and nothing else"
    assert job.processes["producer", 0].wait(60) == 0


def test_items_come_as_they_are_and_waits_are_bounded_and_explained(job: Coordinator) -> None:
    with joined(job, "driver") as me:
        queue = Queue("items", 3, kind="samples")
        assert not queue.get(2, wait=False)
        with pytest.raises(
            InfrastructureError,
            match=r"The queue items had no items for 0 s: 0 of 3 wait, 0 are leased",
        ):
            queue.get(timeout=0.1)
        queue.put({"a": np.arange(6).reshape(2, 3)}, ["x", None], 3.5)
        with pytest.raises(
            InfrastructureError,
            match=r"had no room for 0 s: 3 of 3 wait.*; 0 of 1 items were added",
        ):
            queue.put(1, timeout=0.1)
        later = threading.Timer(0.2, lambda: Queue("items", 3, "samples").get(2, wait=False))
        later.start()
        queue.put(1, timeout=60)
        later.join()
        assert list(queue.get(2)) == [3.5, 1]
        queue.ack(cursor={"done": 2})
        assert me.cursor == {"done": 2}
        for values, why in (
            ((np.zeros(1 << 20),), "An item of the queue items has 8388.* bytes; at most"),
            ((until,), "An item of the queue items is of type function"),
        ):
            with pytest.raises(ConfigurationError, match=why):
                queue.put(*values)
        with pytest.raises(
            ConfigurationError,
            match="used in two ways: driver opened it with size 3 and kind samples",
        ):
            Queue("items", 4)
        with pytest.raises(ConfigurationError, match=r"a put takes|one put takes"):
            queue.put(*range(9), cursor=1)
        with pytest.raises(ConfigurationError, match="The cursor is of type function"):
            me.cursor = until


def test_what_a_loaded_checkpoint_has_not_learned_is_leased_again(job: Coordinator) -> None:
    with joined(job, "trainer"):
        queue = Queue("samples")
        queue.put(*range(6))
        for step in range(1, 4):
            queue.ack(queue.get(2), step=step)
    with joined(job, "trainer", attempt=2):
        launched.loaded(1)
        assert list(Queue("samples").get(4)) == [2, 3, 4, 5]
        assert current_worker().attempt == 2


def test_items_whose_answer_was_lost_come_with_the_next_get(
    job: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(job, "main") as me:
        queue = Queue("items")
        queue.put(*"abc")
        ask = me.link.ask

        def lose(request: RoleRequest) -> RoleReply:
            ask(request)
            raise InfrastructureError("The coordinator cannot be reached.")

        with monkeypatch.context() as patch:
            patch.setattr(me.link, "ask", lose)
            with pytest.raises(InfrastructureError, match="cannot be reached"):
                queue.get(2)
        assert list(queue.get(1)) == ["a"]
        queue.ack()
        assert queue.status().leased == 1, "what nobody has seen is not acknowledged"
        assert list(queue.get(2)) == ["b", "c"]


def test_a_long_wait_for_items_is_no_absence_of_the_coordinator(
    job: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(job, "main") as me:
        queue = Queue("items")
        monkeypatch.setattr(link, "AWAY_TIMEOUT", 0.5)
        client = me.link._connected()
        ask, lost = client.ask, []

        async def late(request: RoleRequest) -> RoleReply:
            if not lost:
                lost.append(request)
                await asyncio.sleep(1.0)
                raise InfrastructureError("The coordinator cannot be reached.")
            return await ask(request)

        monkeypatch.setattr(client, "ask", late)
        queue.put("a")
        assert list(queue.get(1)) == ["a"]
        assert lost


@contextmanager
def interrupted(function: Callable[..., object], after: int) -> Iterator[None]:
    """Raise a KeyboardInterrupt in a function after a number of the steps at which Python handles signals, if it has them."""
    left, last = after, ""

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left, last
        if frame.f_code is not function.__code__:  # type: ignore[attr-defined]
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= last.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
            last = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if left == 0:
                left = -1
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("name", ["put", "_put", "get", "_get", "_ask", "ack"])
def test_an_interrupt_at_any_step_neither_loses_nor_doubles_an_item(
    job: Coordinator, name: str
) -> None:
    got: list[Any] = []
    with joined(job, "main"):
        queue, number, last = Queue("items", 4), 0, 0

        def again(what: Callable[[], object]) -> None:
            nonlocal last
            try:
                with interrupted(getattr(Queue, name), number):
                    what()
            except KeyboardInterrupt:
                last = number
                what()

        while last == number:  # until it has fewer steps than this
            number += 1
            again(functools.partial(queue.put, 2 * number, 2 * number + 1))
            again(lambda: got.extend(queue.get(2)))
            again(queue.ack)
        assert number > 1
        status = queue.status()
        assert got == list(range(2, 2 * number + 2))
        assert (status.added, status.done) == (2 * number, 2 * number)


def test_what_an_interrupted_call_has_asked_for_does_not_happen_later(job: Coordinator) -> None:
    with joined(job, "main"):
        queue = Queue("items", 2)

        def interrupt(what: Callable[[], object]) -> None:
            me = threading.main_thread().ident
            assert me is not None
            threading.Timer(0.3, lambda: signal.pthread_kill(me, signal.SIGUSR1)).start()
            with pytest.raises(KeyboardInterrupt):
                what()

        def raises(*_: object) -> None:
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGUSR1, raises)
        try:
            interrupt(queue.get)
            assert not queue.get(wait=False)
            queue.put("a", "b")
            assert list(Queue("items", 2).get(wait=False)) == ["a"]
            queue.put("c")
            interrupt(lambda: queue.put("d"))
            assert list(queue.get(2)) == ["b", "c"]
            assert not queue.get(wait=False)
            queue.put("e")
            assert list(queue.get(2, timeout=0.1)) == ["e"]
        finally:
            signal.signal(signal.SIGUSR1, before)


def test_a_second_process_in_the_same_place_is_refused_until_the_first_has_left(
    job: Coordinator,
) -> None:
    job.write(
        "second.py", "from dlrover.roles import Queue\nQueue('items').put('from the second')\n"
    )
    with joined(job, "main") as me:
        queue = Queue("items")
        queue.put("a")
        place = me.place

        def second() -> tuple[int, str]:
            process = job.launch("main", 0, str(job.directory.path / "second.py"))
            _, said = process.communicate(timeout=60)
            return process.returncode, said

        code, said = second()
        assert code == 1
        assert said.splitlines()[-1].endswith(
            f"wants the place of main 0, which process {os.getpid()} has: of the processes that an instance starts, only"
            " one may join the job."
        )
        assert list(queue.get()) == ["a"]
        queue.ack()
        worker.leave()
        until(lambda: place not in job.service._watched, 60)
        assert second()[0] == 0
        assert job.status.queues["items"].waiting == 1
