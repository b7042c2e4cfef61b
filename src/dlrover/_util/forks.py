"""Locks that a forked process can use, although another thread held them at the fork and is not there to release them.

Data loaders fork while other threads look rows up. What is changed under a lock must be whole in the child, so a fork
waits for it (`wait_for`); where the child begins anew, its lock is a new one (`Lock`).
"""

from __future__ import annotations

import os
import threading
import weakref
from types import TracebackType
from typing import Any, Protocol


class Acquirable(Protocol):
    """A lock, or several as one."""

    def acquire(self) -> Any:
        """Wait until no other thread holds it, and hold it."""

    def release(self) -> None:
        """Hold it no longer."""


_waited_for: weakref.WeakValueDictionary[int, Acquirable] = weakref.WeakValueDictionary()
_renewed: weakref.WeakValueDictionary[int, Lock] = weakref.WeakValueDictionary()
_forking = threading.RLock()  # two forks at a time would release each other's locks
_held: list[Acquirable] = []


def wait_for(lock: Acquirable) -> None:
    """Let forks of this process wait until no other thread holds a lock.

    Whoever holds several of these at a time acquires them in the order of these calls.
    """
    _waited_for[id(lock)] = lock


class Lock:
    """A lock that is free in a forked process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _renewed[id(self)] = self

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()

    def renew(self) -> None:
        """Be free, whoever holds it."""
        self._lock = threading.Lock()


def _before() -> None:
    _forking.acquire()
    for reference in _waited_for.valuerefs():
        lock = reference()
        if lock is not None:
            lock.acquire()
            _held.append(lock)


def _release() -> None:
    while _held:
        _held.pop().release()
    _forking.release()


def _after_in_child() -> None:
    _release()
    for reference in _renewed.valuerefs():
        lock = reference()
        if lock is not None:
            lock.renew()


os.register_at_fork(before=_before, after_in_parent=_release, after_in_child=_after_in_child)
