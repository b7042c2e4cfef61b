"""Tells objects in the state what of them is stored, so that they can tell others.

An object takes part if it has ``commits``, which says whether it wants to be told, and
``commit_rank_states(states)``, which gets its states of all ranks as a stored step holds them. It is called in
rank 0, in a thread of its own, for the newest stored step only.
"""

from __future__ import annotations

import functools
import logging
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

from dlrover.checkpoint import layout as layouts
from dlrover.checkpoint.layout import Path
from dlrover.checkpoint.saves import SaveId
from dlrover.checkpoint.storage import StoredStep
from dlrover.checkpoint.stores import Store, is_damage, step_folder
from dlrover.errors import InfrastructureError

logger = logging.getLogger(__name__)

POLL = 1.0
"""Seconds between two looks whether a step is stored by now."""
LAST_WAIT = 15.0
"""Seconds that telling may take when the training waits for its last step."""


class Commits:
    """What is to be told. ``newest`` says which save was stored last."""

    def __init__(self, store: Store, newest: Callable[[], SaveId | None]) -> None:
        self._store, self._newest = store, newest
        self._changed = threading.Condition()
        # ---- all below are guarded by _changed
        self._waiting: dict[SaveId, list[tuple[Path, Any]]] = {}
        """By save that is being stored: who wants to be told, and where in the state it is."""
        self._stored: SaveId | None = None
        """A save that was stored without the saver."""
        self._asked = self._served = 0
        """How often somebody has waited, and for how many of these it was looked."""
        self._closed = False
        self._thread: threading.Thread | None = None

    def expect(self, save: SaveId, state: Any) -> None:
        """A save with this state is to be stored."""
        found = list(_committers(state, ()))
        if not found:
            return
        with self._changed:
            self._waiting[save] = found
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="dlrover-commits", daemon=True
                )
                self._thread.start()

    def stored(self, save: SaveId) -> None:
        """A save was stored without the saver."""
        with self._changed:
            self._stored = save

    def settle(self) -> None:
        """Everything is stored that will be: wait until it is told, `LAST_WAIT` seconds at most."""
        with self._changed:
            if not self._waiting:
                return
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._served >= mine, LAST_WAIT)

    def close(self) -> None:
        """Tell nothing any more."""
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
                asked, waiting = self._asked, dict(self._waiting)
            told = self._tell(waiting) if waiting else None
            with self._changed:
                for save in [save for save in self._waiting if told is not None and save <= told]:
                    del self._waiting[save]
                self._served = asked
                self._changed.notify_all()

    def _wanted(self) -> bool:
        return self._closed or self._served < self._asked

    def _tell(self, waiting: dict[SaveId, list[tuple[Path, Any]]]) -> SaveId | None:
        """Tell what the newest stored step holds; up to which save nothing is left to tell."""
        try:
            known = (self._stored, self._newest())
        except InfrastructureError:
            return None  # the saver is gone; the next save starts another
        save = max((one for one in known if one is not None), default=None)
        if save is None or save not in waiting:
            return save
        try:
            trees = self._trees(save.step)
        except (OSError, InfrastructureError) as error:
            if not is_damage(error):
                logger.warning("What step %d holds cannot be read yet: %s", save.step, error)
                return None  # the next look may be better
            logger.warning("What step %d holds is not told to others: %s", save.step, error)
            return save
        for path, committer in waiting[save]:
            _tell_one(committer, path, trees, save.step)
        return save

    def _trees(self, step: int) -> list[Any]:
        """What each rank has stored, without its tensors."""
        with StoredStep(self._store, step_folder(step)) as stored:
            ranks = range(stored.manifest.world_size)
            return [layouts.decode(stored.index(rank).skeleton) for rank in ranks]


def _tell_one(committer: Any, path: Path, trees: list[Any], step: int) -> None:
    try:
        states = [functools.reduce(operator.getitem, path, tree) for tree in trees]
        committer.commit_rank_states(states)
    except (
        Exception
    ):  # the user's own class: whatever it raises must not end the saving of later steps
        logger.exception("%s could not be told what step %d holds", layouts.name(path), step)


def _committers(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if getattr(value, "commits", False) is True and hasattr(value, "commit_rank_states"):
        yield path, value
    elif type(value) in (dict, list, tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _committers(item, (*path, key))
