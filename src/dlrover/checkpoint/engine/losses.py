"""Ranks that are lost while a program that survives losses waits for their parts of a save."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator

import msgspec

from dlrover import launched
from dlrover.checkpoint.engine.world import TorchWorld
from dlrover.checkpoint.machine.saves import NOWHERE, SaveId, SavePlace

POLL = 0.2
"""Seconds between two looks for lost ranks."""
NEWS = 5.0
"""Seconds until it is known that a rank is lost whose part of a save the saver lacks."""


def place() -> SavePlace:
    """Return where the ranks are, to be stored with a save."""
    return NOWHERE if launched.survival is None else SavePlace(*launched.survival.place())


def continued(save: SaveId | None) -> None:
    """Say from which save the program continues; None: from none."""
    if launched.survival is not None:
        known = save or SaveId(0, 0, 0, 0)
        launched.survival.continued(known.number, msgspec.structs.astuple(known.place))


def since(world: TorchWorld, membership: int) -> bool:
    """Return whether a rank was lost since a membership has begun to save; the saver may have seen it first."""
    survival, until = launched.survival, time.monotonic() + NEWS
    if survival is None or world.size == 1:
        return False
    while not survival.lacking and survival.number == membership:
        if time.monotonic() > until:
            return False
        threading.Event().wait(POLL)
    return True


@contextlib.contextmanager
def watched(
    world: TorchWorld, saves: Collection[SaveId], give_up: Callable[[SaveId], None]
) -> Iterator[None]:
    """Give the saves up as soon as a rank is lost, which may not have added its part to them."""
    survival, done = launched.survival, threading.Event()
    if survival is None or world.size == 1:
        yield
        return

    def watch() -> None:
        while not done.wait(POLL):
            if survival.lacking:
                for save in list(saves):
                    give_up(save)
                return

    watcher = threading.Thread(target=watch, name="dlrover-lost-ranks")
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
