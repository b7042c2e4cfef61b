"""Clocks for journals."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from dlrover._util import decoding, files

logger = logging.getLogger(__name__)


class Zero(msgspec.Struct, frozen=True):
    """Where a clock begins."""

    boot: str
    """The boot of the machine to whose monotonic clock ``offset`` belongs."""
    offset: float
    """Wall time minus monotonic time, in seconds."""


class Clock:
    """Wall clock in seconds that never runs backwards: the wall time at the start plus monotonic time."""

    def __init__(self, not_before: float = 0.0, offset: float | None = None) -> None:
        offset = time.time() - time.monotonic() if offset is None else offset
        self.offset = max(offset, not_before - time.monotonic())

    def __call__(self) -> float:
        """Return the seconds since the epoch."""
        return self.offset + time.monotonic()


def kept_in(path: Path) -> Callable[[float], Clock]:
    """Return a function that makes a clock not before a given time, as `Clock` does, and notes its zero in a file.

    If the given time is above 0, the clock goes on from the zero in the file: a wall clock that was set while no
    process of the job kept the time changes no duration. Another boot of the machine begins anew, and so does each
    process where a container hides the boot.
    """

    def clock(not_before: float = 0.0) -> Clock:
        try:
            boot = boot_id()
        except OSError as error:
            logger.info("The job's clock is not noted: %s", error)
            return Clock(not_before)
        known = _read(path) if not_before else None
        if known is not None and known.boot == boot:
            return Clock(not_before, known.offset)
        made = Clock(not_before)
        try:
            files.write_atomically(path, msgspec.json.encode(Zero(boot, made.offset)))
        except OSError as error:
            logger.warning("The job's clock is not noted in %s: %s", path, error)
        return made

    return clock


def _read(path: Path) -> Zero | None:
    try:
        return decoding.json(path.read_bytes(), Zero)
    except (OSError, msgspec.DecodeError):
        return None


def boot_id() -> str:
    """Return an id of the machine's current boot.

    Raises:
        OSError: the system hides it.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
