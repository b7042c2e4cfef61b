"""Forks of a test's process: none returns into the test, and what goes wrong in one fails the test."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.children import Child


def fails() -> None:
    raise ValueError("in the work")


def test_what_the_work_returns_and_raises_comes_to_the_test() -> None:
    assert Child(lambda: [os.getppid()]).result() == [os.getpid()]
    with pytest.raises(pytest.fail.Exception, match=r"(?s)in fails\n.*ValueError: in the work"):
        Child(fails).end()


def test_a_signal_that_ends_a_child_is_told() -> None:
    child = Child(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert child.end() == -signal.SIGKILL
    with pytest.raises(AssertionError, match="SIGKILL ended a fork"):
        child.result()


@pytest.mark.slow
def test_a_child_that_does_not_end_is_ended() -> None:
    with pytest.raises(pytest.fail.Exception, match="still ran after 1 s"):
        Child(signal.pause, within=1).end()
