"""A call that Ctrl-C interrupts while the saver's answer is on its way: the calls after it get answers of their own."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from dlrover.checkpoint import Checkpointer
from dlrover.checkpoint.saver import protocol
from dlrover.errors import InfrastructureError

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(60)]


@pytest.fixture
def checkpointer(directory):
    with contextlib.closing(Checkpointer(directory, linger=0.0)) as made:
        made.save(1, {"w": torch.zeros(1000)})
        made._saving.pool.wait()
        yield made


@pytest.fixture
def interrupt(monkeypatch):
    """Interrupt the main thread's next requests of these numbers, before or after their answers have come."""
    receive, main = protocol.receive_reply, threading.main_thread()

    def begin(*numbers: int, late: bool = False) -> None:
        left = list(numbers)

        def interrupted(sock):
            if threading.current_thread() is not main or not left:
                return receive(sock)
            left[:] = [number - 1 for number in left]
            if 0 not in left:
                return receive(sock)
            left.remove(0)
            if late:
                receive(sock)
            raise KeyboardInterrupt

        monkeypatch.setattr(protocol, "receive_reply", interrupted)

    return begin


def check(checkpointer: Checkpointer, step: int) -> None:
    """Save to storage and load."""
    checkpointer.save(step, {"w": torch.full((1000,), float(step))}, to="storage")
    checkpointer.wait()
    assert checkpointer._client.stored().step == step
    fresh = {"w": torch.zeros(1000)}
    assert checkpointer.load(fresh).step == step
    assert torch.equal(fresh["w"], torch.full((1000,), float(step)))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_a_save_after_one_that_was_interrupted_is_made(checkpointer, interrupt, number, late):
    interrupt(number, late=late)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.save(2, {"w": torch.ones(1000)}, to="storage")
    check(checkpointer, 3)


@pytest.mark.parametrize("late", [False, True])
def test_a_save_after_a_wait_that_was_interrupted_is_made(checkpointer, interrupt, late):
    checkpointer.save(2, {"w": torch.ones(1000)}, to="storage")
    interrupt(1, late=late)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.wait()
    check(checkpointer, 3)


def test_a_look_that_was_interrupted_is_made_again(checkpointer, interrupt):
    interrupt(1)
    with pytest.raises(KeyboardInterrupt):
        checkpointer._client.look()
    assert [held.save.step for held in checkpointer._client.look().held] == [1]


def test_a_request_that_is_interrupted_while_it_waits_for_an_earlier_one_ends_the_connection(
    checkpointer, interrupt
):
    """How far it came is unknown; the next save connects again."""
    interrupt(1, 2)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            checkpointer._client.keep(None)
    check(checkpointer, 4)


def test_failures_in_an_answer_that_came_too_late_are_said_by_the_next_wait(
    checkpointer, interrupt, directory
):
    checkpointer.save(2, {"w": torch.ones(1000)}, to="storage")
    checkpointer.wait()
    (directory / "checkpoint-id").unlink()
    checkpointer.save(3, {"w": torch.ones(1000)}, to="storage")
    interrupt(1)
    with pytest.raises(KeyboardInterrupt):
        checkpointer.wait()
    checkpointer._client.look()
    with pytest.raises(InfrastructureError, match="Step 3 was not stored"):
        checkpointer.wait()
