"""Asyncio tasks that nothing awaits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def start(work: Coroutine[Any, Any, T], among: set[asyncio.Task[T]]) -> asyncio.Task[T]:
    """Run a coroutine as a task that ``among`` holds until it is done; an exception in it is logged."""
    task = asyncio.create_task(work)
    among.add(task)

    def done(task: asyncio.Task[T]) -> None:
        among.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("Defect in a background task", exc_info=task.exception())

    task.add_done_callback(done)
    return task
