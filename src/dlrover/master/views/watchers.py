"""Those who watch a job: all of them share one status at a time, since that of thousands of nodes takes long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from dlrover._util import tasks
from dlrover.master.journal.history import History
from dlrover.rpc.messages import Notice, Status, WatchRequest

INTERVAL = 0.2
"""Minimum seconds between two views."""
REFRESH = 1.0
"""Seconds after which there is another view even if nothing has changed."""
NOTICE_BYTES = 1024 * 1024
"""Maximum size of the events in one notice, in bytes; a large job's status needs room beside them."""


@dataclass
class _View:
    """The status at one time (of the running loop), and the notices that were made of it."""

    at: float
    status: Status
    #: number of the events until then
    events: int
    #: by the number of events that a watcher knows
    notices: dict[int, Notice] = field(default_factory=dict)


class Watchers:
    """The watchers of one job. All methods run on one event loop."""

    def __init__(self, history: History, status: Callable[[], Status]) -> None:
        self.changed = asyncio.Event()
        """Set, and replaced by another one, when anything has changed."""
        self._history = history
        self._status = status
        self._view: _View | None = None
        self._stale = False

    def wake(self) -> None:
        """Wake all tasks that wait for a change."""
        self._stale = True
        self.changed.set()
        self.changed = asyncio.Event()

    async def watch(self, request: WatchRequest) -> AsyncIterator[Notice]:
        """Yield the events after ``request.since`` and, for a follower, those to come."""
        since, view = max(0, request.since), None
        while True:
            view = await self._after(view)
            while True:
                notice = self._notice(view, since)
                since += len(notice.events)
                yield notice
                if since >= view.events:
                    break
            if not request.follow:
                return

    async def _after(self, shown: _View | None) -> _View:
        """Return the view that follows the ``shown`` one; wait for a change, if it is the present one."""
        now = asyncio.get_running_loop().time
        view = self._view
        if view is not None and view is shown and not self._stale:
            await tasks.signalled(self.changed, view.at + REFRESH - now())
        if view is not None and view is self._view:
            await asyncio.sleep(max(0.0, view.at + INTERVAL - now()))
        if self._view is view:
            self._stale = False
            self._view = _View(now(), self._status(), len(self._history.events))
        assert self._view is not None
        return self._view

    def _notice(self, view: _View, since: int) -> Notice:
        notice = view.notices.get(since)
        if notice is None:
            fresh = self._history.batch(since, NOTICE_BYTES)[: max(0, view.events - since)]
            notice = view.notices[since] = Notice(fresh, view.status)
        return notice
