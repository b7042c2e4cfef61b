"""Waiting for a source that is away for a moment, such as a database or a file server."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from dlrover import launched
from dlrover._util import backoff
from dlrover.errors import InfrastructureError

logger = logging.getLogger(__name__)

PATIENCE = 60.0
"""Seconds that a source may be away, or need for an answer."""
RETRY = 0.1, 1.0
"""Seconds until the first retry, and between later ones."""
Result = TypeVar("Result")


def starts_again() -> bool:
    """Return whether this worker takes the place of an earlier one: what it cannot find was there before."""
    return launched.given.round > 1 or launched.given.attempt > 0


def insist(
    call: Callable[[], Result],
    source: str,
    may_pass: Callable[[Exception], bool],
    describe: Callable[[Exception], str] = str,
) -> Result:
    """Call until there is a result, up to `PATIENCE` seconds; errors that do not pass are raised.

    Args:
        call: reads the source.
        source: its name, as the subject of a sentence.
        may_pass: returns whether an error may be gone at the next call.
        describe: returns an error's text.

    Raises:
        InfrastructureError: the source stays away.
    """
    until, waiting = time.monotonic() + PATIENCE, False
    delays = backoff.delays(*RETRY)
    while True:
        try:
            return call()
        except Exception as error:
            if not may_pass(error):
                raise
            delay = next(delays)
            if time.monotonic() + delay > until:
                # Other texts of the error may have secrets.
                raise InfrastructureError(f"{source} cannot be read: {describe(error)}") from None
            if not waiting:
                logger.warning("%s cannot be read; retrying: %s", source, describe(error))
        waiting = True
        threading.Event().wait(delay)
