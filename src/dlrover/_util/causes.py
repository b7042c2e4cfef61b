"""Exceptions that caused others."""

from __future__ import annotations

from collections.abc import Iterator


def chain(error: BaseException | None, attribute: str) -> Iterator[BaseException]:
    """Yield an error and those that caused it; ``attribute`` is where the errors of a library keep their cause."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:  # ``raise error from error`` makes a circle
        yield error
        seen.append(error)
        error = getattr(error, attribute, None) or error.__cause__ or error.__context__
