"""Times as Kubernetes writes them (RFC 3339), from and to seconds since 1970."""

from __future__ import annotations

import datetime as dt


def written(seconds: float) -> str:
    """Return a time as ``2026-11-21T08:36:12Z``."""
    return _utc(seconds).strftime("%Y-%m-%dT%H:%M:%SZ")


def written_micro(seconds: float) -> str:
    """Return a time as ``2026-11-21T08:36:12.000000Z``; Leases need all six digits."""
    return _utc(seconds).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def read(text: str) -> float | None:
    """Return a time in seconds; None if the text is not a time."""
    try:
        return dt.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return None


def _utc(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.timezone.utc)
