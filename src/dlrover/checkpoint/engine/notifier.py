"""Notification of objects in the state when a step is stored, so that they can commit their part elsewhere.

An object takes part if its ``commits`` is True and it has ``commit_rank_states(states)``, which gets the
object's states of all ranks as a stored step holds them. Rank 0 calls it in a separate thread, for the newest
stored step only.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.layout import Path
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.storage.stored_step import StoredStep
from dlrover.checkpoint.storage.stores import Store, is_damage, step_folder
from dlrover.errors import InfrastructureError

logger = logging.getLogger(__name__)

POLL = 1.0
"""Seconds between checks for a newly stored step."""
LAST_WAIT = 15.0
"""Seconds to wait for notifications when the training waits for its last step, or closes."""


class StoredStepNotifier:
    """Pending notifications. ``newest`` returns the newest save that the saver stored."""

    def __init__(self, store: Store, newest: Callable[[], SaveId | None]) -> None:
        self._store, self._newest = store, newest
        self._changed = threading.Condition()
        # ---- all below are guarded by _changed
        self._waiting: dict[SaveId, list[tuple[Path, Any]]] = {}
        """By save that is being stored: the objects to notify, with their paths in the state."""
        self._stored: SaveId | None = None
        """A save that was stored without the saver."""
        self._asked = self._served = 0
        """The number of calls of `settle` so far, and how many of them have been served."""
        self._closed = False
        self._thread: threading.Thread | None = None

    def expect(self, save: SaveId, state: Any) -> None:
        """Expect a save with this state to be stored."""
        found = list(_committers(state, ()))
        if not found:
            return
        with self._changed:
            self._waiting[save] = found
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="dlrover-notifier", daemon=True
                )
                self._thread.start()

    def stored(self, save: SaveId) -> None:
        """Note that a save was stored without the saver."""
        with self._changed:
            self._stored = save

    def settle(self) -> None:
        """Wait up to `LAST_WAIT` seconds until objects are notified of all that is stored by now."""
        with self._changed:
            if not self._waiting:
                return
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._served >= mine, LAST_WAIT)

    def close(self) -> None:
        """Stop notifying."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(LAST_WAIT)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._wanted, POLL)
                if self._closed:
                    return
                asked, waits = self._asked, bool(self._waiting)
            done = self._notify() if waits else None
            with self._changed:
                for save in [save for save in self._waiting if done is not None and save <= done]:
                    del self._waiting[save]
                self._served = asked
                self._changed.notify_all()

    def _wanted(self) -> bool:
        return self._closed or self._served < self._asked

    def _notify(self) -> SaveId | None:
        """Notify of the newest stored step; return the save up to which nothing is left to do."""
        try:
            known = (self._stored, self._newest())
        except InfrastructureError:
            return None  # the saver is gone; the next save starts a new one
        save = max((one for one in known if one is not None), default=None)
        with self._changed:
            # Only now: the saver may have stored a save that was not expected yet when it was asked.
            found = self._waiting.get(save) if save is not None else None
        if save is None or found is None:
            return save
        try:
            trees = self._trees(save.step)
        except (OSError, InfrastructureError) as error:
            if not is_damage(error):
                logger.warning("What step %d holds cannot be read yet: %s", save.step, error)
                return None  # the next attempt may succeed
            logger.warning(
                "Objects are not notified of step %d, which cannot be read: %s", save.step, error
            )
            return save
        for path, committer in found:
            _notify_one(committer, path, trees, save.step)
        return save

    def _trees(self, step: int) -> list[Any]:
        """Return what each rank stored, without its tensors."""
        with StoredStep(self._store, step_folder(step)) as stored:
            ranks = range(stored.manifest.world_size)
            return [layouts.decode(stored.index(rank).skeleton) for rank in ranks]


def _notify_one(committer: Any, path: Path, trees: list[Any], step: int) -> None:
    try:
        states = [functools.reduce(operator.getitem, path, tree) for tree in trees]
        committer.commit_rank_states(states)
    except Exception:
        # The user's own class: no exception of it may end the notification of later steps.
        logger.exception("%s failed when it was notified of step %d", layouts.name(path), step)


def _committers(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if getattr(value, "commits", False) is True and hasattr(value, "commit_rank_states"):
        yield path, value
    elif type(value) in (dict, list, tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _committers(item, (*path, key))
