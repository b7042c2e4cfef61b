"""JSON texts that are nested deeper than a decoder can follow: a user may create such objects."""

from __future__ import annotations

import re

DEEPEST = 200
"""Levels that are kept of such a text. A valid job has fewer, and so does every list of jobs."""
_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


def cut(text: bytes) -> bytes:
    """Return a JSON text with ``null`` instead of each value that is nested deeper than `DEEPEST` levels."""
    kept, depth, since = [], 0, 0
    for token in _TOKENS.finditer(text):
        if token[0] in (b"[", b"{"):
            depth += 1
            if depth == DEEPEST + 1:
                kept += [text[since : token.start()], b"null"]
        elif token[0] in (b"]", b"}"):
            depth -= 1
            if depth == DEEPEST:
                since = token.end()
    return b"".join([*kept, text[since:]])
