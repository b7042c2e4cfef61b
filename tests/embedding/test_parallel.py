"""Calls at once: their results, their errors, and an interrupt meanwhile."""

from __future__ import annotations

import signal
import threading

import pytest

from dlrover.embedding.remote.parallel import for_each


def test_results_are_in_the_order_of_the_items() -> None:
    second = threading.Event()

    def call(number: int) -> int:
        assert second.wait(5) if number == 1 else not second.set()
        return 2 * number

    assert for_each([1, 2], call, lambda: None) == [2, 4]
    assert for_each([], call, lambda: None) == []


def test_the_first_error_is_raised_once_all_calls_have_ended() -> None:
    ended = []

    def call(number: int) -> None:
        ended.append(number)
        raise ValueError(number)

    with pytest.raises(ValueError, match="1"):
        for_each([1, 2, 3], call, lambda: None)
    assert sorted(ended) == [1, 2, 3]


def test_an_interrupt_stops_the_calls() -> None:
    stopped = threading.Event()

    def call(_: int) -> None:
        signal.raise_signal(signal.SIGUSR1)  # handled in the main thread, which waits
        assert stopped.wait(5)

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            for_each([1], call, stopped.set)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert stopped.is_set()
