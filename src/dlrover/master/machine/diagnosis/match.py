"""Search of a text for regular expressions, fast where nothing matches.

Pure. A table has a hundred expressions of many alternatives each, and most match nowhere. Before a search,
the text is checked for words without which the expression cannot match.

A user's expressions are searched by RE2, whose time is linear in the length of the text: some take for ever in
Python's own search, and the result must not depend on a clock, since a journal is replayed to the same state.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

from dlrover.errors import ConfigurationError

Needed: TypeAlias = tuple[frozenset[str], ...]
"""Sets of words; a text must contain one word of each set."""

SHORTEST = 3
"""Minimum length in characters of a word worth checking for."""

# Inline flags, comments, back references, characters by number: rare, and not worth parsing.
_UNUSUAL = re.compile(r"\(\?(?![:=!]|<[=!])|\\[xuUN\d]")
_CAPITALS = re.compile(r"\\.|[A-Z]")
_AT_MOST = re.compile(r"(?<!\\)\{,\d+\}")


class Linear(str):
    """An expression of a user, which RE2 searches."""

    __slots__ = ()


def search(expression: str, text: str) -> re.Match[str] | None:
    """Return the first match of ``expression`` in ``text``, ignoring case."""
    return _pattern(expression).search(text)


def last_match(expression: str, text: str) -> re.Match[str] | None:
    """Return the last match of ``expression`` in ``text``, ignoring case."""
    return functools.reduce(lambda _, found: found, _pattern(expression).finditer(text), None)


def occurs(expression: str, folded: str) -> bool:
    """Return whether ``expression`` matches in a lower-case text."""
    for pattern, needed in _folded(expression):
        for words in needed:
            for word in words:
                if word in folded:
                    break
            else:
                break
        else:
            if pattern.search(folded) is not None:
                return True
    return False


@functools.lru_cache(maxsize=None, typed=True)
def _pattern(expression: str) -> re.Pattern[str]:
    if isinstance(expression, Linear):
        return linear(expression)
    return re.compile(expression, re.IGNORECASE | re.MULTILINE)


def linear(expression: str) -> re.Pattern[str]:
    """Return a pattern of RE2.

    Raises:
        ValueError: the expression is wrong, or RE2 does not know a part of it.
        ConfigurationError: RE2 is not installed.
    """
    try:
        re2: Any = importlib.import_module("re2")
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "The regular expressions of diagnosis_rules need the package google-re2; install it with "
            "pip install 'dlrover[rules]'."
        ) from error
    if found := _AT_MOST.search(expression):
        raise ValueError(f"{found[0]} stands for itself; a repetition is {{0{found[0][1:]}")
    options = re2.Options()
    options.case_sensitive = options.log_errors = False
    try:
        pattern: re.Pattern[str] = re2.compile(f"(?m){expression}", options)
    except re2.error as error:
        raise ValueError(error.args[0].decode()) from error
    return pattern


@functools.lru_cache(maxsize=None, typed=True)
def _folded(expression: str) -> tuple[tuple[re.Pattern[str], Needed], ...]:
    r"""Return the alternatives of ``expression`` for a lower-case text; ``\S`` stays as it is."""
    if isinstance(expression, Linear):
        return ((_pattern(expression), ()),)
    lower = _CAPITALS.sub(lambda m: m[0] if m[0].startswith("\\") else m[0].lower(), expression)
    if _UNUSUAL.search(lower):
        return ((re.compile(lower, re.MULTILINE), ()),)
    return tuple(
        (re.compile(alternative, re.MULTILINE), needed)
        for alternative, needed in _Words(lower).alternatives()
    )


class _Words:
    """Parser that goes through an expression once."""

    def __init__(self, expression: str) -> None:
        self._rest = expression

    def alternatives(self) -> list[tuple[str, Needed]]:
        """Return the alternatives up to the end of the group, each with the words that it needs."""
        found = []
        while True:
            before = self._rest
            needed = tuple(words for words in self._sequence() if _worth(words))
            found.append((before[: len(before) - len(self._rest)], needed))
            if not self._rest.startswith("|"):
                return found
            self._rest = self._rest[1:]

    def _sequence(self) -> Iterator[frozenset[str]]:
        """Yield sets of words; a matching text must contain one word of each set."""
        run = ""
        while self._rest and self._rest[0] not in "|)":
            part = self._part()
            optional = re.match(r"[?*]|\{0", self._rest) is not None
            quantifier = re.match(r"(?:[?*+]|\{\d*,?\d*\})\??", self._rest)
            if quantifier:
                self._rest = self._rest[quantifier.end() :]
            if isinstance(part, str) and not optional:
                run += part
            if not isinstance(part, str) or optional or quantifier or not part:
                yield frozenset({run})
                run = ""
            if not isinstance(part, str) and not optional:
                yield part
        yield frozenset({run})

    def _part(self) -> str | frozenset[str]:
        """Return one literal character, the words of one group, or an empty text for anything else."""
        first, self._rest = self._rest[0], self._rest[1:]
        if first == "(":
            return self._group()
        if first == "[":
            end = re.match(r"\^?\]?(?:\\.|[^\]\\])*\]", self._rest)
            self._rest = self._rest[end.end() if end else 0 :]
            return ""
        if first == "\\":
            first, self._rest = self._rest[0], self._rest[1:]
            return "" if first.isalnum() else first
        return "" if first in ".^$" else first

    def _group(self) -> str | frozenset[str]:
        """Return words such that each match of the group contains one; an empty text if there are none."""
        looks = re.match(r"\?(?:[=!]|<[=!])", self._rest)
        self._rest = re.sub(r"\A\?(?:<?[=!]|:)", "", self._rest)
        inner = [max(needed, key=_worth, default=frozenset()) for _, needed in self.alternatives()]
        self._rest = self._rest[1:]
        return "" if looks or not all(inner) else frozenset().union(*inner)


def _worth(words: frozenset[str]) -> int:
    shortest = min(map(len, words), default=0)
    return shortest if shortest >= SHORTEST else 0
