"""The destination of each save: set by the user's interval, or by one picked from measured costs."""

from __future__ import annotations

import contextlib
import logging
import operator
import time
from typing import Literal

from dlrover.checkpoint.engine.client import SaverClient
from dlrover.checkpoint.engine.world import TorchWorld
from dlrover.checkpoint.machine.interval import HOURS_BETWEEN_FAILURES, Auto, Costs, Do
from dlrover.checkpoint.machine.saves import SaveId
from dlrover.checkpoint.saver.protocol import SaverGoneError
from dlrover.errors import ConfigurationError

logger = logging.getLogger(__name__)

MAX_STEP = 2**63 - 1
"""Largest step that memory and files have room for."""
Interval = int | Literal["auto"] | None


def check(interval: object, hours_between_failures: float | None) -> None:
    """Refuse an invalid interval or time between failures.

    Raises:
        ConfigurationError: a value is out of range.
    """
    if not (interval in (None, "auto") or (isinstance(interval, int) and interval >= 1)):
        raise ConfigurationError(f"interval is {interval!r}; it must be 1 or more, or 'auto'.")
    if hours_between_failures is not None and not hours_between_failures > 0:
        raise ConfigurationError(
            f"hours_between_failures is {hours_between_failures}; it must be more than 0."
        )


def number_of(step: object) -> int:
    """Return a step as a plain number, also one of NumPy or of a tensor; -1 if it is none from 0 to `MAX_STEP`."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        return -1
    return number if 0 <= number <= MAX_STEP else -1


def check_arguments(step: object, to: str | None) -> None:
    """Refuse arguments of a save.

    Raises:
        ConfigurationError: one is wrong.
    """
    if to not in ("memory", "storage", None):
        raise ConfigurationError(f"to is {to!r}; it must be 'memory' or 'storage'.")
    if number_of(step) < 0:
        raise ConfigurationError(
            f"step is {step!r}; it must be a whole number, 0 or more, and below 2**63."
        )


class Pace:
    """Destination of saves that do not name one."""

    def __init__(
        self, interval: Interval, hours_between_failures: float | None, world: TorchWorld
    ) -> None:
        hours = hours_between_failures or HOURS_BETWEEN_FAILURES / world.size
        self._interval = interval
        self._seconds = hours * 3600
        self._world = world
        self.asked: dict[SaveId, float] = {}
        """Times at which saves that are not durable yet were sent to storage, by this process's clock."""
        self.begin()

    def begin(self) -> None:
        """Count from here and measure anew, with ranks that have just begun to save."""
        self._auto = Auto(self._seconds)

    def due(self, step: int, client: SaverClient) -> Do:
        """Return the destination of a step."""
        if self._interval == "auto":
            do = self._auto.ask(time.monotonic())  # first, because all ranks must count alike
            self._note_durable(client)
            return do
        return "storage" if self._interval and step % self._interval == 0 else "memory"

    def _note_durable(self, client: SaverClient) -> None:
        if not self.asked:
            return
        with contextlib.suppress(SaverGoneError):  # the save that follows restarts the saver
            newest = client.stored()
            for save in [save for save in self.asked if newest is not None and save <= newest]:
                began = self.asked.pop(save)
                if save == newest:
                    self.stored(began)

    def saved(self, began: float) -> None:
        """Note that a save that began at ``began`` has returned."""
        now = time.monotonic()
        self._auto.saved(now - began, now)

    def stored(self, began: float) -> None:
        """Note that a step sent to storage at ``began`` is durable."""
        self._auto.stored(time.monotonic() - began)

    def settle(self) -> None:
        """Pick the interval if it is due. Collective: call it after each save that names no destination."""
        if self._interval != "auto" or not self._auto.due:
            return
        mine = [round(seconds * 1e6) for seconds in self._auto.costs]
        worst = [max(values) / 1e6 for values in zip(*self._world.exchange(mine), strict=True)]
        picked = self._auto.settle(Costs(*worst))
        if picked is not None and self._world.rank == 0:
            logger.info("%s", picked.sentence(Costs(*worst)))
