"""From a worker's failure to a verdict: what happened, whose fault it is, what to do next.

Pure: it reads nothing but the failure records. What failures look like is said in the table of causes
(`dlrover.master.diagnosis_rules`); this module finds the row that fits the facts of a record, and words
the verdict. ``own`` is always the user's rows, which are tried before the table's.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from dlrover.master.diagnosis_facts import Facts, one_line, read, signal_name
from dlrover.master.diagnosis_rules import by_kind
from dlrover.spec.failure import Action, Failure, FailureKind, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlrover.spec.rules import Rule

ECHO_WINDOW = 10.0
"""Seconds by which a failure may be seen later than its echo and still be the root cause.

A dying process closes its connections first, so that its peers fail within milliseconds; it is seen to
have ended only when its exit handlers, its core dump and the release of its device are done.
"""

OTHERS_SHOWN = 8
"""Failed ranks named beside the root cause; of the rest only their number is told."""

_CAPITALS = re.compile(r"\\.|[A-Z]")
_TITLE_LIMIT = 120
"""Characters of an exception's message that a title shows."""


def diagnose(failure: Failure, own: tuple[Rule, ...] = ()) -> Verdict:
    """The verdict on one failure."""
    facts = read(failure)
    rule = _rule_of(facts, own)
    fields = {
        "error": facts.error,
        "code": failure.exit_code,
        "signal": f"{signal_name(facts.code)} (signal {facts.code})",
        "place": facts.place,
        "subject": "",
    }
    fields["subject"] = _subject(rule, facts) or rule.otherwise.format(**fields)
    return Verdict(
        title=_title(failure, facts, rule.title.format(**fields)),
        origin=rule.origin,
        hopeless=rule.action is Action.STOP,
        evidence=_evidence(facts, rule),
        advice=rule.advice.format(**fields),
        signature=_signature(failure, facts, rule),
        cause=rule.cause,
        action=rule.action,
        echo=rule.echo,
    )


def is_echo(failure: Failure, own: tuple[Rule, ...] = ()) -> bool:
    """Whether ``failure`` may only follow from the end of a peer, or from being told to stop."""
    return _rule_of(read(failure), own).echo


def root_cause(failures: Sequence[Failure], own: tuple[Rule, ...] = ()) -> Failure:
    """The failure that came first, unless it echoes another one of its round.

    Reports arrive in any order and echoes are often seen before their cause, so the earliest failure
    that is no echo wins when it ended within `ECHO_WINDOW` of the first.

    Raises:
        ValueError: ``failures`` is empty.
    """
    if not failures:
        raise ValueError("root_cause needs at least one failure, got none.")
    ordered = sorted(failures, key=_when)
    first = ordered[0]
    near = (f for f in ordered if f.round == first.round and f.time <= first.time + ECHO_WINDOW)
    return next((f for f in near if not is_echo(f, own)), first)


def other_failures(
    failures: Sequence[Failure], root: Failure | None, own: tuple[Rule, ...] = ()
) -> tuple[str, ...]:
    """One line for each failed rank but ``root``, first ones first; at most `OTHERS_SHOWN` and a count."""
    others = [f for f in sorted(failures, key=_when) if root is None or f.id != root.id]
    lines = [diagnose(f, own).title for f in others[:OTHERS_SHOWN]]
    if len(others) > OTHERS_SHOWN:
        lines.append(f"and {len(others) - OTHERS_SHOWN} more")
    return tuple(lines)


# ---- rules


@functools.cache
def _pattern(expression: str) -> re.Pattern[str]:
    return re.compile(expression, re.IGNORECASE | re.MULTILINE)


def _rule_of(facts: Facts, own: tuple[Rule, ...]) -> Rule:
    return next(rule for rule in by_kind(own)[facts.kind] if _fits(rule, facts))


def _fits(rule: Rule, facts: Facts) -> bool:
    """Whether every condition of ``rule`` holds, the cheap ones first."""
    return (
        _is_named(rule, facts)
        and (not rule.oom_killed or facts.oom_killed)
        and (not rule.before_first_step or facts.steps == 0)
        and (not rule.facts or _fact(rule, facts) != "")
        and (
            not rule.raised_in
            or _found(rule.raised_in, facts.frames[-1].file.lower() if facts.frames else "")
        )
        and (not rule.text or _found(rule.text, facts.folded))
    )


def _is_named(rule: Rule, facts: Facts) -> bool:
    """Whether ``rule`` names the exception, the exit code or the signal, if it names any."""
    if facts.kind is FailureKind.EXCEPTION:
        return not rule.types or facts.error in rule.types
    if facts.kind is FailureKind.EXIT:
        return not rule.codes or facts.code in rule.codes
    if facts.kind is FailureKind.SIGNAL:
        return not rule.signals or signal_name(facts.code) in rule.signals
    return True


def _fact(rule: Rule, facts: Facts) -> str:
    """The last fact about the node that ``rule`` asks for; empty if there is none."""
    return next((fact for fact in reversed(facts.node) if _found(rule.facts, fact.lower())), "")


def _found(expression: str, folded: str) -> bool:
    """Whether ``expression`` is found in a text in lower case: three times as fast as ignoring case."""
    return _folded(expression).search(folded) is not None


@functools.cache
def _folded(expression: str) -> re.Pattern[str]:
    r"""``expression`` for a text in lower case; ``\S`` stays what it is."""
    lower = _CAPITALS.sub(lambda m: m[0] if m[0].startswith("\\") else m[0].lower(), expression)
    return re.compile(lower, re.MULTILINE)


def _subject(rule: Rule, facts: Facts) -> str:
    found = _pattern(rule.subject).search(facts.text) if rule.subject else None
    return next((group for group in found.groups() if group), "") if found else ""


# ---- words


def _title(failure: Failure, facts: Facts, title: str) -> str:
    what, _, why = title.partition(": ")
    if facts.kind is FailureKind.SIGNAL and failure.kind is FailureKind.EXIT:
        what, why = f"left with exit code {failure.exit_code}", f"a program that it ran {what}"
    host = f" ({failure.hostname})" if failure.hostname else ""
    reported = facts.kind in (FailureKind.EXCEPTION, FailureKind.SPAWN, FailureKind.NODE)
    said = one_line(facts.message, _TITLE_LIMIT) if reported else ""
    where = f"rank {failure.rank} {what} on node {failure.node_id}{host}"
    if facts.kind is FailureKind.NODE:
        where = f"node {failure.node_id}{host} {what}"
    return ": ".join(part for part in (where, why, said) if part)


def _evidence(facts: Facts, rule: Rule) -> str:
    if rule.evidence:
        return rule.evidence
    if rule.facts:
        return one_line(_fact(rule, facts))
    if facts.kind is FailureKind.EXCEPTION:
        error = f"{facts.error}: {facts.message}" if facts.message else facts.error
        return f"{facts.frame}\n{one_line(error)}" if facts.frame else one_line(error)
    if facts.kind in (FailureKind.SPAWN, FailureKind.NODE):
        return one_line(facts.message)
    return _last_words(facts, rule)


def _last_words(facts: Facts, rule: Rule) -> str:
    """What stderr says of a process that left no exception."""
    said = list(_pattern(rule.text).finditer(facts.stderr)) if rule.text else []
    if said:
        start = facts.stderr.rfind("\n", 0, said[-1].end()) + 1
        return one_line(facts.stderr[start:].partition("\n")[0])
    if facts.frames:
        top, frame = facts.frames[-1], facts.frame
        return str(top) if frame is top else f"{top}, called at {frame}"
    lines = [line for line in facts.stderr.splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else "it wrote nothing to its standard error"


def _signature(failure: Failure, facts: Facts, rule: Rule) -> str:
    if facts.kind is FailureKind.EXCEPTION:
        frame = facts.frame
        where = f":{frame.name}:{frame.function}:{frame.line}" if frame else ""
        return f"exception:{facts.error}{where}"
    if failure.kind is FailureKind.SIGNAL:
        return f"signal:{signal_name(facts.code)}{':oom' if rule.oom_killed else ''}"
    if failure.kind is FailureKind.EXIT:
        return f"exit:{failure.exit_code}"
    return str(failure.kind.value)


def _when(failure: Failure) -> tuple[float, int, str]:
    return failure.time, failure.rank, failure.id
