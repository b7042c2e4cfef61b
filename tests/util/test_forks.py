"""Processes that are forked while other threads hold locks: the child uses what they protect, and none waits for ever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dlrover._native import library
from dlrover._util import forks
from dlrover.embedding import HashTable, Spill

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


def forked(work: Callable[[], None]) -> bool:
    """Return whether a fork of this process does its work within 10 s."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    until = time.monotonic() + 10
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.001)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


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
        assert all(forked(child) for _ in range(FORKS))


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
    found = forked(child)
    ended.set()
    thread.join()
    assert found
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
        assert all(forked(work) for _ in range(FORKS))
    assert all(lock.acquire(blocking=False) for lock in locks), "forks leave them free"
