"""Waits of tests: bounded, and with a sentence when they fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import pytest

Value = TypeVar("Value")

POLL = 0.05
"""Seconds between two looks at a condition."""


def until(
    condition: Callable[[], Value],
    timeout: float = 30.0,
    what: str = "",
    report: Callable[[], str] = str,
) -> Value:
    """Return the first true value of ``condition()``; after ``timeout`` seconds, fail the test with ``report()``."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > end:
            name = what or getattr(condition, "__name__", "the condition")
            pytest.fail(f"{name} did not come true within {timeout:g} s{report()}")
        time.sleep(POLL)
    return value
