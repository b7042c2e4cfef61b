"""The job's key-value store, as workers and agents use it: a request may wait for another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakValueDictionary

from dlrover._util import tasks
from dlrover.master.journal.commits import Commits
from dlrover.master.machine.store import KeyValueStore
from dlrover.rpc import messages


class StoreService:
    """Service for the store requests of one job."""

    def __init__(self) -> None:
        self.contents = KeyValueStore()
        # set when there is an answer; kept alive by the requests that wait for it
        self.awaited: WeakValueDictionary[tuple[str, int], asyncio.Event] = WeakValueDictionary()

    def apply(self, request: messages.StoreRequest) -> None:
        """Apply a request that is in the journal.

        Raises:
            ProtocolError: it cannot be applied; nothing has changed.
        """
        self.contents.apply(request)

    async def answer(
        self, request: messages.StoreRequest, commits: Commits, clock: Callable[[], float]
    ) -> messages.StoreReply:
        """Journal and apply a request; wait for its answer no longer than it asks for."""
        topic = _topic(request)
        until = clock() + getattr(request, "wait", 0.0)
        if isinstance(request, messages.GetKey):
            value = self.contents.reply(request)
        else:
            value = await commits.commit(request, lambda _now: self._carried_out(request))
        while value is None and clock() < until:
            answered = self.awaited.setdefault(topic, asyncio.Event())
            await tasks.signalled(answered, until - clock())
            value = self.contents.reply(request)
        if value is not None and topic in self.awaited:
            self.awaited.pop(topic).set()
        return messages.StoreReply(value)

    def _carried_out(self, request: messages.StoreRequest) -> bytes | None:
        self.apply(request)
        return self.contents.reply(request)


def _topic(request: messages.StoreRequest) -> tuple[str, int]:
    """Return what a request waits for or may bring about: a key, or a number of members at a barrier.

    Requests that would have to keep waiting are not woken; else a barrier of n members costs n * n wake-ups.
    """
    match request:
        case messages.EnterBarrier():
            return request.name, request.size
        case messages.DeleteKeys():
            return "", 0
        case _:
            return request.key, 0
