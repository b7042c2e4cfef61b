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
from dlrover.checkpoint.storage import StoredStep
from dlrover.checkpoint.stores import Store, step_folder
from dlrover.errors import InfrastructureError

logger = logging.getLogger(__name__)

POLL = 1.0
"""Seconds between two looks whether a step is stored by now."""
LAST_WAIT = 15.0
"""Seconds that telling may take when the training waits for its last step."""


class Commits:
    """What is to be told. ``newest`` says which step was stored last, -1: none."""

    def __init__(self, store: Store, newest: Callable[[], int]) -> None:
        self._store, self._newest = store, newest
        self._changed = threading.Condition()
        # ---- all below are guarded by _changed
        self._waiting: dict[int, list[tuple[Path, Any]]] = {}
        """By step that is being stored: who wants to be told, and where in the state it is."""
        self._stored = -1
        """A step that was stored without the saver."""
        self._asked = self._served = 0
        """How often somebody has waited, and for how many of these it was looked."""
        self._closed = False
        self._thread: threading.Thread | None = None

    def expect(self, step: int, state: Any) -> None:
        """A step with this state is to be stored."""
        found = list(_committers(state, ()))
        if not found:
            return
        with self._changed:
            self._waiting[step] = found
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="dlrover-commits", daemon=True
                )
                self._thread.start()

    def stored(self, step: int) -> None:
        """A step was stored without the saver."""
        with self._changed:
            self._stored = step

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
            told = self._tell(waiting) if waiting else -1
            with self._changed:
                for step in [step for step in self._waiting if step <= told]:
                    del self._waiting[step]
                self._served = asked
                self._changed.notify_all()

    def _wanted(self) -> bool:
        return self._closed or self._served < self._asked

    def _tell(self, waiting: dict[int, list[tuple[Path, Any]]]) -> int:
        """Tell what the newest stored step holds; up to which step nothing is left to tell."""
        try:
            step = max(self._stored, self._newest())
        except InfrastructureError:
            return -1  # the saver is gone; the next save starts another
        if step not in waiting:
            return step
        try:
            trees = self._trees(step)
        except (OSError, InfrastructureError) as error:
            logger.warning("What step %d holds is not told to others: %s", step, error)
            return step
        for path, committer in waiting[step]:
            _tell_one(committer, path, trees, step)
        return step

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
