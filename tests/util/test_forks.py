"""Processes that are forked while other threads hold locks: the child uses what they protect, and none waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dlrover._native import library
from dlrover._util import forks
from dlrover.embedding import HashTable, Spill
from tests.support.children import Child

needs_library = pytest.mark.skipif(
    library.load("auto").library is None, reason="the compiled library is not there"
)
KEYS = np.arange(20_000)
FORKS = 15


@contextmanager
def repeated(work: Callable[[], object]) -> Iterator[None]:
    """Call something time and again in another thread."""
    ended = threading.Event()

    def run() -> None:
        while not ended.is_set():
            work()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def forked(work: Callable[[], None]) -> None:
    """Do some work in a fork of this process within 10 s."""
    Child(work, within=10).result()


@pytest.mark.parametrize("choice", ["off", pytest.param("require", marks=needs_library)])
@pytest.mark.parametrize("spilled", [False, True])
def test_a_table_is_used_in_a_fork_while_it_is_changed(
    choice: str, spilled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLROVER_NATIVE", choice)
    limits = {"memory_bytes": 64 << 20, "spill": Spill(directory=str(tmp_path), nbytes=1 << 22)}
    table = HashTable(8, optimizer="sgd", learning_rate=1.0, **limits if spilled else {})
    few = KEYS[:: 1 if choice == "require" else 50]
    table.lookup(few)
    gradients = np.ones((len(few), 8), np.float32)

    def child() -> None:
        before = table.peek(few)
        table.update(few, gradients)
        table.lookup(few + len(KEYS))
        np.testing.assert_allclose(table.peek(few), before - 1, atol=1e-3)

    with repeated(lambda: table.update(few, gradients)):
        for _ in range(FORKS):
            forked(child)


def test_a_fork_does_not_wait_for_a_lock_that_it_makes_anew() -> None:
    lock, held, ended = forks.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            ended.wait()

    def child() -> None:
        with lock:
            pass

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        forked(child)
    finally:
        ended.set()
        thread.join()
    child()


def test_forks_of_several_threads_at_a_time() -> None:
    locks = [threading.RLock() for _ in range(3)]
    for lock in locks:
        forks.wait_for(lock)

    def work() -> None:
        for lock in locks:
            with lock:
                pass

    with repeated(work), repeated(lambda: forked(work)):
        for _ in range(FORKS):
            forked(work)
    assert all(lock.acquire(blocking=False) for lock in locks), "forks leave them free"
