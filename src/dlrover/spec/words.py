"""Helpers for sentences."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

GIB = 1 << 30
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


def counted(number: int, noun: str) -> str:
    """Return ``1 node``, ``2 nodes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def size(amount: int) -> str:
    """Return a number of bytes in words: ``1.5 GiB``, ``512 MiB``."""
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount >> 20} MiB"


def gib(amount: float) -> str:
    """Return a number of bytes as options take it: ``1.5Gi``."""
    return f"{amount / GIB:.3g}Gi"


def did_you_mean(name: str, known: Iterable[str], before: str = "", after: str = "") -> str:
    """Return `` Did you mean save?`` with the known name that is nearest to ``name``; empty if none is near.

    ``before`` and ``after`` surround the name: a directory, a suffix.
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {before}{near[0]}{after}?" if near else ""


def printable(text: str) -> str:
    """Return ``text`` on one line, without escape sequences and unprintable characters."""
    plain = _ESCAPE.sub("", text).expandtabs()
    return "".join(" " if c.isspace() else c for c in plain if c.isprintable() or c.isspace())


def printable_lines(text: str) -> str:
    """Return ``text`` with its lines, each as `printable`."""
    return "\n".join(map(printable, text.split("\n")))
