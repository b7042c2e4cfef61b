"""Group commit: requests that arrive at about the same time are journalled in one transaction.

A transaction per request would cost a busy master more than all its other work for the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from dlrover.errors import DLRoverError
from dlrover.master.journal.journal import Entry

WINDOW = 0.001
"""Seconds that the first request waits for as many as the last commit had."""
ALONE = 3
"""Consecutive lone requests after which the next one does not wait."""

Reply = TypeVar("Reply")


class _Uncommitted(NamedTuple):
    entry: Entry
    handle: Callable[[float], Any]
    reply: asyncio.Future[Any]


class Commits:
    """Group commit of requests, which are journalled and then handled in the same order: replies are durable.

    ``append`` adds entries to the journal, all or none, at a time in seconds, which ``clock`` returns.
    """

    def __init__(
        self, append: Callable[[Sequence[Entry], float], None], clock: Callable[[], float]
    ) -> None:
        self._append = append
        self._clock = clock
        self._waiting: list[_Uncommitted] = []
        self._alone = 0
        self._usual = 0
        self._timer: asyncio.Handle | None = None

    async def commit(self, entry: Entry, handle: Callable[[float], Reply]) -> Reply:
        """Journal a request, then return the result of ``handle``, called with the time of its entry.

        A request whose caller leaves before that is dropped.

        Raises:
            InfrastructureError: the journal cannot be written; nothing was handled.
        """
        return await self.begin(entry, handle)

    def begin(self, entry: Entry, handle: Callable[[float], Reply]) -> asyncio.Future[Reply]:
        """Begin what `commit` waits for; return its result to come."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._timer = loop.call_later(WINDOW if self._alone < ALONE else 0.0, self._commit)
        reply: asyncio.Future[Reply] = loop.create_future()
        self._waiting.append(_Uncommitted(entry, handle, reply))
        if len(self._waiting) == self._usual and self._timer is not None:
            self._timer.cancel()
            self._timer = loop.call_soon(self._commit)
        return reply

    def _commit(self) -> None:
        waiting = [each for each in self._waiting if not each.reply.cancelled()]
        self._waiting = []
        self._alone = self._alone + 1 if len(waiting) == 1 else 0
        self._usual = max(2, len(waiting))
        if not waiting:
            return
        now = self._clock()
        try:
            self._append([each.entry for each in waiting], now)
        except DLRoverError as error:
            for each in waiting:
                each.reply.set_exception(error)
            return
        for each in waiting:
            _reply(each, now)


def _reply(to: _Uncommitted, now: float) -> None:
    try:
        to.reply.set_result(to.handle(now))
    except Exception as error:  # noqa: BLE001 - it is raised in the caller
        to.reply.set_exception(error)
