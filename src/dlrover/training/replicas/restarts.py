"""`restartable`: a training function that is called again in its living process when another rank is lost."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from dlrover import launched
from dlrover.errors import InfrastructureError, UserCodeError
from dlrover.spec.requests.membership import (
    FinishMembers,
    JoinMembers,
    LookMembers,
    Members,
    RenewMembers,
)
from dlrover.training.machine.places import NEWS_LIMIT
from dlrover.training.replicas import hooks
from dlrover.training.replicas.groups import (
    TIMEOUT,
    Descriptor,
    MeetingStore,
    connections,
    shut_down,
)
from dlrover.training.replicas.link import Link, open_link

logger = logging.getLogger(__name__)

LEAVE_LIMIT = 30.0
"""Seconds that the function may take to end after a loss; then the process is killed, and starts again."""
RETURN_LIMIT = 600.0
"""Seconds for which ranks wait for the processes of lost ones."""
AGAIN = 10.0
"""Seconds until a rank that was started again, and waits for others, says once more that it is there."""

Function = TypeVar("Function", bound=Callable[..., Any])


def restartable(function: Function) -> Function:
    """Let a training function be called again, in the living process, when another rank is lost.

    The function makes its own process group (``init_process_group``) and loads its checkpoint. After a loss, its
    collectives fail, it ends with their error, and it is called again with the same arguments once all ranks are back:
    imports, the accelerator's context and compiled code are kept. A function that does not end within `LEAVE_LIMIT`
    costs its process. One that returns after a loss, since it handles the error, is called again, too. Needs
    ``dlrover-run --survive``; elsewhere the function is called once.

    Raises:
        UserCodeError: Its call does not train: the function is a coroutine or a generator.
    """
    later = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    if any(is_one(function) for is_one in later):
        raise UserCodeError(
            f"restartable: a call of {function.__name__} does not train, as it is a coroutine or a generator; let a plain"
            " function run it."
        )

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
        self._attempts: dict[int, int] = {}
        """Attempt of each rank in the present call."""
        self._before: set[Descriptor] = set()
        self._left: threading.Event | None = None
        """Set when the present call has ended; None between two calls."""
        self._lock = threading.Lock()
        link.on_change = self._note

    def call(self, function: Callable[[], Any]) -> Any:
        """Call the function until it returns, or fails although no rank is lost."""
        given = self._given
        self._link.ask(LookMembers(given.round))
        while True:
            members = self._all_there()
            self._number, self._attempts = members.number, members.attempts
            launched.call = members.number + 1
            store = MeetingStore(self._link, given.round, members.number, members.attempts)
            try:
                with self._group(store):
                    result = function()
            except Exception as error:  # any of the program's: what a lost rank causes in it
                newer = self._link.wait(self._is_newer, NEWS_LIMIT)
                if self._link.over or not (newer or store.refused):
                    raise
                if newer is None:  # a master that has lost its journal knows another membership
                    renew = RenewMembers(given.round, given.rank, given.attempt, self._number)
                    self._link.ask(renew)
                logger.warning("A rank was lost; the training function is called again: %s", error)
            else:
                if not self._lacks(self._link.members):
                    self._link.ask(FinishMembers(given.round, given.rank, given.attempt))
                    return result
                logger.warning("A rank was lost; the training function is called again.")

    def _lacks(self, members: Members | None) -> bool:
        """Return whether a rank of the present call is lost."""
        if members is None or members.over or not self._is_newer(members):
            return False
        return members.attempts != self._attempts

    def _is_newer(self, members: Members) -> bool:
        return members.number > self._number

    def _all_there(self) -> Members:
        """Wait until all ranks train, in the membership after the last call's."""
        given, size = self._given, self._given.world_size

        def holds(members: Members) -> bool:
            return self._is_newer(members) and len(members.attempts) == size and trains(members)

        def trains(members: Members | None) -> bool:
            return members is not None and members.attempts.get(given.rank) == given.attempt

        for turn in range(int(RETURN_LIMIT / AGAIN)):
            # A master that has lost its journal may not know that this rank had joined.
            if (turn and given.attempt) or not trains(self._link.members):
                self._link.ask(JoinMembers(given.round, given.rank, given.attempt))
            found = self._link.wait(lambda members: members.over or holds(members), AGAIN)
            if found is not None and holds(found):
                return found
            if found is not None:
                raise InfrastructureError(
                    "--survive: a rank has returned from the training function while another one was lost; all ranks start again."
                )
        raise InfrastructureError(
            f"Some of the {size} ranks did not come back within {RETURN_LIMIT:g} s."
        )

    @contextlib.contextmanager
    def _group(self, store: MeetingStore) -> Iterator[None]:
        """Let ``init_process_group`` meet the ranks of this membership; destroy the groups in the end."""
        left = threading.Event()
        with self._lock:
            self._before, self._left = connections(), left
        self._note(self._link.members)
        hooks.plain_group = {
            "store": store,
            "rank": self._given.rank,
            "world_size": self._given.world_size,
            "timeout": TIMEOUT,
        }
        if not dist.is_initialized():
            # One that failed has counted: the next would look for its peers under another name, for ever.
            dist.distributed_c10d._world.group_count = 0  # noqa: SLF001
        try:
            with store.kept():
                yield
        finally:
            left.set()
            with self._lock:
                self._left = None
            hooks.plain_group = None
            if dist.is_initialized():
                dist.destroy_process_group()

    def _note(self, members: Members | None) -> None:
        """Let the function's collectives fail after a loss; runs in the link's thread."""
        with self._lock:
            if self._left is None or members is None or not self._is_newer(members):
                return
            if members.attempts == self._attempts:
                return
            shut_down(connections() - self._before)
            late = threading.Thread(target=self._end_late, args=(self._left,), daemon=True)
        late.start()

    def _end_late(self, left: threading.Event) -> None:
        """Kill this process if the call does not end: the next rung is another process."""
        if not left.wait(LEAVE_LIMIT):
            logger.error("The training function did not end within %g s of a loss", LEAVE_LIMIT)
            os.kill(os.getpid(), signal.SIGKILL)
