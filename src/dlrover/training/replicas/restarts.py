"""`restartable`: a training function that is called again in its living process when another rank is lost."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from dlrover import launched
from dlrover.errors import InfrastructureError
from dlrover.spec.requests.membership import (
    FinishMembers,
    JoinMembers,
    LookMembers,
    Members,
    MembersNow,
)
from dlrover.training.machine.places import NEWS_LIMIT
from dlrover.training.replicas import hooks
from dlrover.training.replicas.groups import TIMEOUT, MeetingStore, connections, shut_down
from dlrover.training.replicas.link import Link, open_link

logger = logging.getLogger(__name__)

LEAVE_LIMIT = 30.0
"""Seconds that the function may take to end after a loss; then the process is killed, and starts again."""
RETURN_LIMIT = 600.0
"""Seconds for which ranks wait for the processes of lost ones."""

Function = TypeVar("Function", bound=Callable[..., Any])


def restartable(function: Function) -> Function:
    """Let a training function be called again, in the living process, when another rank is lost.

    The function makes its own process group (``init_process_group``) and loads its checkpoint. After a loss, its
    collectives fail, it ends with their error, and it is called again with the same arguments once all ranks are back:
    imports, the accelerator's context and compiled code are kept. A function that does not end within `LEAVE_LIMIT`
    costs its process. Needs ``dlrover-run --survive``; elsewhere the function is called once.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not launched.given.survive:
            return function(*args, **kwargs)
        return _Restarts(open_link(), launched.given).call(lambda: function(*args, **kwargs))

    return call  # type: ignore[return-value]


class _Restarts:
    """The calls of one function."""

    def __init__(self, link: Link, given: launched.Given) -> None:
        self._link, self._given = link, given
        self._number = -1
        self._before: set[int] = set()
        self._running = False
        self._left = threading.Event()
        self._lock = threading.Lock()
        link.on_change = self._note

    def call(self, function: Callable[[], Any]) -> Any:
        """Call the function until it returns, or fails although no rank is lost."""
        given = self._given
        join = JoinMembers(given.round, given.rank, given.attempt)
        reply = self._link.ask(join if given.attempt else LookMembers(given.round))
        assert isinstance(reply, MembersNow)
        while True:
            members = self._all_there()
            self._number = members.number
            try:
                with self._group(members):
                    result = function()
            except Exception as error:  # any of the program's: what a lost rank causes in it
                if self._link.wait(self._is_newer, NEWS_LIMIT) is None or self._link.over:
                    raise
                logger.warning("A rank was lost; the training function is called again: %s", error)
            else:
                self._link.ask(FinishMembers(given.round, given.rank, given.attempt))
                return result

    def _is_newer(self, members: Members) -> bool:
        return members.number > self._number

    def _all_there(self) -> Members:
        """Wait until all ranks train, in the membership after the last call's."""
        mine, size = self._given.rank, self._given.world_size
        found = self._link.wait(
            lambda m: self._is_newer(m) and len(m.attempts) == size and mine in m.attempts,
            RETURN_LIMIT,
        )
        if found is None:
            raise InfrastructureError(
                f"Some of the {size} ranks did not come back within {RETURN_LIMIT:g} s."
            )
        return found

    @contextlib.contextmanager
    def _group(self, members: Members) -> Iterator[None]:
        """Let ``init_process_group`` meet the ranks of this membership; destroy the groups in the end."""
        store = MeetingStore(self._link, self._given.round, members.number, members.attempts)
        self._left.clear()
        with self._lock:
            self._before, self._running = connections(), True
        self._note(self._link.members)
        hooks.plain_group = {
            "store": store,
            "rank": self._given.rank,
            "world_size": self._given.world_size,
            "timeout": TIMEOUT,
        }
        try:
            yield
        finally:
            self._left.set()
            with self._lock:
                self._running = False
            hooks.plain_group = None
            if dist.is_initialized():
                dist.destroy_process_group()

    def _note(self, members: Members | None) -> None:
        """Let the function's collectives fail after a loss; runs in the link's thread."""
        with self._lock:
            lost = members is not None and len(members.attempts) < self._given.world_size
            if not (lost and self._running) or members is None or not self._is_newer(members):
                return
            shut_down(connections() - self._before)
        threading.Thread(target=self._end_late, daemon=True).start()

    def _end_late(self) -> None:
        """Kill this process if the function does not end: the next rung is another process."""
        if not self._left.wait(LEAVE_LIMIT):
            logger.error("The training function did not end within %g s of a loss", LEAVE_LIMIT)
            os.kill(os.getpid(), signal.SIGKILL)
