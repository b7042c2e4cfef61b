"""The table of causes: the rows that come with DLRover, and those of a user's file.

Both are TOML with a list named ``rule``, whose entries have the fields of `dlrover.spec.failure.Rule`. A
failure gets the first row of its kind whose conditions all hold. The user's rows are tried first.
DLRover's last row for each kind has no condition, so every failure gets one.
"""

from __future__ import annotations

import enum
import functools
import re
import signal
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dlrover._util import decoding
from dlrover.errors import ConfigurationError, readable
from dlrover.master.machine.diagnosis.diagnosis import EXPRESSIONS, RuleTable
from dlrover.master.machine.diagnosis.match import linear
from dlrover.spec.failure import Rule

BUILT_IN = Path(__file__).with_name("diagnosis_rules.toml")
"""File with the rows that come with DLRover."""

_TEMPLATES = ("title", "advice", "otherwise")
_CONTENTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "cause": (
        lambda name: re.fullmatch(r"[a-z][a-z0-9_]*", name),
        "lower-case letters, digits and underscores",
    ),
    "codes": (
        lambda codes: all(0 <= code <= 255 for code in codes),
        "exit codes, from 0 to 255",
    ),
    "signals": (
        lambda signals: set(signals) <= set(signal.Signals.__members__),
        "names of signals, as SIGKILL is",
    ),
}
"""Whether a value of the field's type is accepted, and what is."""
_TEMPLATE_FIELDS = ("error", "code", "signal", "place", "subject")
_REQUIRED = ("cause", "origin", "title", "advice")
_TYPES: dict[str, Any] = typing.get_type_hints(Rule)


@functools.cache
def built_in() -> tuple[Rule, ...]:
    """Return the rows that come with DLRover."""
    return load(BUILT_IN, re.compile)


def table(own: tuple[Rule, ...] = ()) -> RuleTable:
    """Return the table of a job: the user's ``own`` rows, then DLRover's."""
    return RuleTable((*own, *built_in()), own=len(own))


def causes(own: tuple[Rule, ...] = ()) -> frozenset[str]:
    """Return the names of all causes."""
    return frozenset(row.cause for row in (*own, *built_in()))


def load_own(path: str, budgets: Mapping[str, int]) -> tuple[Rule, ...]:
    """Return the user's rows, none if ``path`` is empty; check that ``budgets`` names known causes.

    Raises:
        ConfigurationError: the file cannot be read, a row is wrong, or a budget is wrong.
    """
    own = load(Path(path)) if path else ()
    known = causes(own)
    for cause, count in budgets.items():
        if cause not in known:
            raise ConfigurationError(
                f"cause_budgets names {cause}, which is not a cause; the causes are "
                f"{', '.join(sorted(known))}."
            )
        if count < 0:
            raise ConfigurationError(f"cause_budgets {cause} = {count}: must be 0 or more.")
    return own


def load(path: Path, compile_: Callable[[str], object] = linear) -> tuple[Rule, ...]:
    """Return the rows of a file, in order; ``compile_`` checks their regular expressions.

    Raises:
        ConfigurationError: the file cannot be read, or a row is wrong; one sentence says where.
    """
    with readable(f"diagnosis_rules {path}", "; it takes a TOML file"):
        data = path.read_bytes()
    try:
        content = decoding.toml(data)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"diagnosis_rules {path} is not valid TOML: {error}.") from error
    rows = content.get("rule")
    if set(content) != {"rule"} or not isinstance(rows, list):
        raise ConfigurationError(
            f"diagnosis_rules {path} holds {', '.join(content) or 'nothing'}; it takes rows that begin "
            "with [[rule]], and nothing else."
        )
    return tuple(
        _row(row, f"diagnosis_rules {path}: row {n}", compile_) for n, row in enumerate(rows, 1)
    )


def _row(row: Any, where: str, compile_: Callable[[str], object]) -> Rule:
    if not isinstance(row, dict):
        raise ConfigurationError(f"{where} is {row!r}; it takes a table of fields.")
    for name in _REQUIRED:
        if name not in row:
            raise ConfigurationError(
                f"{where} has no {name}; each row takes {', '.join(_REQUIRED)}."
            )
    for name, value in row.items():
        accepted = _problem(name, value, compile_)
        if accepted:
            raise ConfigurationError(f"{where}: {name} = {value!r}; {accepted}.")
    return decoding.convert(row, Rule)


def _problem(name: str, value: Any, compile_: Callable[[str], object]) -> str:
    """Return what is accepted instead of ``value``; empty if ``value`` is valid."""
    if name not in _TYPES:
        return f"it is not a field; the fields are {', '.join(Rule.__struct_fields__)}"
    try:
        decoding.convert(value, _TYPES[name])
    except msgspec.ValidationError:
        return f"it takes {_accepted(_TYPES[name])}"
    if name in _CONTENTS:
        fits, accepted = _CONTENTS[name]
        return "" if fits(value) else f"it takes {accepted}"
    if name in EXPRESSIONS:
        return _expression_problem(value, compile_)
    return _template_problem(value) if name in _TEMPLATES else ""


def _expression_problem(value: str, compile_: Callable[[str], object]) -> str:
    try:
        compile_(value)
    except (ValueError, re.error) as error:
        return f"it takes a regular expression of RE2, and in this one: {error}"
    return ""


def _template_problem(value: str) -> str:
    try:
        value.format(**dict.fromkeys(_TEMPLATE_FIELDS, ""))
    except (KeyError, IndexError, ValueError, AttributeError):
        return f"it takes words and {', '.join(f'{{{field}}}' for field in _TEMPLATE_FIELDS)}"
    return ""


def _accepted(kind: Any) -> str:
    """Return in words what a field of the type ``kind`` accepts."""
    if typing.get_origin(kind) is tuple:
        return f"a list, each entry {_accepted(typing.get_args(kind)[0])}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(str(member.value) for member in kind)}"
    return {str: "a text", int: "a whole number", bool: "true or false"}[kind]
