"""Diagnosis of a worker's failure: what happened, whose fault it is, what to do next.

Pure: reads nothing but failure records and logs. The table of causes (`dlrover.master.diagnosis_rules`)
says what failures look like; this module finds the row that fits the facts of a record, and words
the verdict.

The program is at fault only if there is evidence: a row that says so, or an exception that its own files
raised. A failure that no row knows is undetermined.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from dlrover.master.machine.diagnosis import log, traceback
from dlrover.master.machine.diagnosis.facts import UNKNOWN_CODE, Facts, read, read_log, signal_name
from dlrover.master.machine.diagnosis.match import (
    Linear,
    last_match,
    linear,
    occurs,
    search,
)
from dlrover.master.machine.diagnosis.traceback import is_user_file, one_line
from dlrover.spec import stacks
from dlrover.spec.events import HangFound, WorkerFailed
from dlrover.spec.failure import (
    NOT_JOINED,
    Action,
    Failure,
    FailureKind,
    Origin,
    OwnCode,
    Rule,
    Verdict,
)
from dlrover.spec.words import printable

ECHO_WINDOW = 10.0
"""Maximum delay in seconds between an echo and its root cause, if the root cause is noticed later.

A dying process closes its connections first, so its peers fail within milliseconds. Its own end is noticed
only after its exit handlers, its core dump and the release of its device.
"""

OTHERS_SHOWN = 8
"""Maximum number of failed ranks named beside the root cause; the rest is only counted."""

EXPRESSIONS = ("text", "facts", "raised_in", "subject")
"""Fields of a rule that are regular expressions."""
_TITLE_LIMIT = 120
"""Maximum length of an exception's message in a title, in characters."""
_SIGNATURE_LIMIT = 80
"""Maximum length of the message that distinguishes failures without a traceback, in characters."""
_VARIES = re.compile(r"0x[0-9a-f]+|(?<![\w.-])[\w.-]*/[\w./-]*|[0-9][0-9a-f:.-]*")
"""Parts that differ between two messages of the same failure: addresses, paths, numbers."""
_OF_THE_PROCESS = frozenset(
    {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGTRAP", "SIGSYS"}
)
"""Signals that a process brings upon itself: its last words explain them."""
_OWN_CODE = tuple(OwnCode)
_UNKNOWN = Rule(
    cause="unknown",
    origin=Origin.UNKNOWN,
    general=True,
    title="failed",
    advice="Look in the log for its last words.",
)


@dataclass(frozen=True)
class Interpretation:
    """One way to read a failure, and the row that fits it."""

    facts: Facts
    rule: Rule

    @property
    def strength(self) -> int:
        """Rank of the reading; the lowest number says the most."""
        facts, rule = self.facts, self.rule
        if facts.of_handled:
            return 9 if rule.general else 7
        if rule.echo:
            return 6
        return self._general() if rule.general else self._specific()

    def _specific(self) -> int:
        # Connections also break because a peer has failed.
        if self.facts.kind is FailureKind.EXCEPTION:
            return 2 if self.rule.cause == "network" else 0
        return 2 if self.facts.kind is FailureKind.SIGNAL else 3

    def _general(self) -> int:
        users = self.rule.origin is Origin.USER
        if self.facts.kind is FailureKind.EXCEPTION and users and self.facts.frames:
            return 1
        if self.facts.kind is FailureKind.SIGNAL:
            return 4
        if self.facts.kind is FailureKind.EXIT and users:
            return 7  # a program that passes on an exit code calls exit, too
        return 5 if users else 8


class RuleTable:
    """The rules of one job, tried in order: the user's, then those that come with DLRover."""

    def __init__(self, rules: Iterable[Rule] = (), own: int = 0) -> None:
        """Create a table of ``rules``; the first ``own`` are the user's.

        Raises:
            ConfigurationError: RE2 is not installed, and they need it.
        """
        rules = tuple(rules)
        self.rules = (*map(_searched_by_re2, rules[:own]), *rules[own:])
        self._by_kind = {
            kind: tuple(rule for rule in self.rules if rule.is_for(kind)) for kind in FailureKind
        }
        self._own = self.rules[:own]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RuleTable) and self.rules == other.rules

    __hash__ = None  # type: ignore[assignment]

    def diagnose(self, failure: Failure) -> Verdict:
        """Return the verdict on one failure."""
        return _verdict(failure, self._best(read(failure)))

    def failed(self, failure: Failure) -> WorkerFailed:
        """Return a failure with the verdict on it."""
        return WorkerFailed(failure, self.diagnose(failure))

    def diagnose_log(self, text: str) -> Verdict:
        """Return the verdict on the output of a program and its launcher."""
        failure = Failure(
            id="log",
            kind=FailureKind.EXIT,
            node_id=-1,
            rank=-1,
            local_rank=-1,
            round=0,
            exit_code=UNKNOWN_CODE,
            stderr_tail=text,
        )
        return _verdict(failure, self._best(read_log(read(failure)[-1])))

    def _best(self, ways: Iterable[Facts]) -> Interpretation:
        """Return the reading that says the most, the first one among equals."""
        return min((Interpretation(f, self._rule_of(f)) for f in ways), key=lambda r: r.strength)

    def _rule_of(self, facts: Facts) -> Rule:
        rules = self._by_kind[facts.kind]
        return next((rule for rule in rules if self._fits(rule, facts)), _UNKNOWN)

    def _fits(self, rule: Rule, facts: Facts) -> bool:
        """Return whether every condition of ``rule`` holds; cheap ones are checked first."""
        return _suits(rule, facts) and (
            not rule.text or occurs(rule.text, self._words(rule, facts))
        )

    def _words(self, rule: Rule, facts: Facts) -> str:
        """Return the text for ``rule`` to search: the program's own messages may say anything."""
        about_own = rule.own_code is not OwnCode.ABSENT or rule in self._own
        return facts.folded if about_own else facts.folded_given


def root_cause(reports: Sequence[WorkerFailed]) -> WorkerFailed:
    """Return the failure that caused the others.

    Reports arrive in any order, and echoes are often seen before their cause. So the earliest failure of the
    round that is no echo wins if it ended within `ECHO_WINDOW` of the first; else one that names a rank that did not
    join a collective; else the first one.

    Raises:
        ValueError: ``reports`` is empty.
    """
    if not reports:
        raise ValueError("root_cause needs at least one failure, got none.")
    ordered = sorted(reports, key=_when)
    first = ordered[0]
    round_, until = first.failure.round, first.failure.time + ECHO_WINDOW
    near = [r for r in ordered if r.failure.round == round_ and r.failure.time <= until]
    causes = (r for r in near if not r.verdict.echo)
    return next(causes, None) or next(filter(_names_a_rank, near), first)


def _names_a_rank(report: WorkerFailed) -> bool:
    return any(fact.startswith(NOT_JOINED) for fact in report.failure.node_facts)


def hang_verdict(found: HangFound) -> Verdict:
    """Return the verdict on a hang, whose cause is undetermined."""
    where = f"{found.evidence} in the job directory" if found.evidence else "the log of the master"
    if found.thread:
        advice = "Correct what ended the thread, or end the rank with it: the other threads may wait for it."
    elif found.ranks:
        ranks = f"{stacks.ranks_in_words(found.ranks)}{_on(found.nodes)}"
        advice = f"Look for what {ranks} waited for or did at this place; {where} has all stacks."
    else:
        advice = f"Look for what the ranks wait for there, and for collectives that not all of them call; {where} has all stacks."
    return Verdict(
        title=found.title,
        origin=Origin.UNKNOWN,
        evidence=found.thread or found.groups,
        advice=advice,
        signature=found.title,
        cause="hang",
    )


def _on(nodes: Sequence[int]) -> str:
    """Return `` on node 3``, `` on nodes 3 and 5``, or `` on 62 nodes``; empty if none is known."""
    if len(nodes) > 2:
        return f" on {len(nodes)} nodes"
    named = " and ".join(map(str, nodes))
    return f" on node{'s' if len(nodes) > 1 else ''} {named}" if nodes else ""


def ended_thread(rank: int, stderr: str) -> str:
    """Return which thread of a rank an exception ended, in words; ``stderr`` begins with the interpreter's."""
    head, _, rest = stderr.partition("\n")
    thread = head.removeprefix(stacks.THREAD_ENDED).rstrip(":")
    found = next(iter(traceback.raised(rest)), None)
    if found is None:
        return ""
    own = [frame for frame in found.frames if is_user_file(frame.file)]
    place = f" ({own[-1].name}:{own[-1].line})" if own else ""
    message = one_line(found.message.partition("\n")[0], _TITLE_LIMIT)
    said = f": {message}" if message else ""
    return printable(
        f"an exception had ended the thread {thread} of rank {rank}: {found.error}{said}{place}"
    )


def other_failures(reports: Sequence[WorkerFailed], root: WorkerFailed | None) -> tuple[str, ...]:
    """Return a line per failed rank but ``root``, earliest first: at most `OTHERS_SHOWN` and a count."""
    ordered = sorted(reports, key=_when)
    others = [r for r in ordered if root is None or r.failure.id != root.failure.id]
    lines = [report.verdict.title for report in others[:OTHERS_SHOWN]]
    if len(others) > OTHERS_SHOWN:
        lines.append(f"and {len(others) - OTHERS_SHOWN} more")
    return tuple(lines)


# ---- rules


def _searched_by_re2(rule: Rule) -> Rule:
    expressions = {name: Linear(getattr(rule, name)) for name in EXPRESSIONS}
    for expression in filter(None, expressions.values()):
        linear(expression)  # a job must not find at its first failure that this fails
    return msgspec.structs.replace(rule, **expressions)


def _suits(rule: Rule, facts: Facts) -> bool:
    """Return whether every condition of ``rule`` except its text holds."""
    return (
        _is_named(rule, facts)
        and (not rule.oom_killed or facts.oom_killed)
        and (not rule.before_first_step or facts.steps == 0)
        and _OWN_CODE.index(rule.own_code) <= _OWN_CODE.index(facts.own_code)
        and (not rule.facts or _fact(rule, facts) != "")
        and (
            not rule.raised_in
            or occurs(rule.raised_in, facts.frames[-1].file.lower() if facts.frames else "")
        )
    )


def _is_named(rule: Rule, facts: Facts) -> bool:
    """Return whether ``rule`` names the exception, exit code or signal of ``facts``, or names none."""
    if facts.kind is FailureKind.EXCEPTION:
        return not rule.types or facts.error in rule.types
    if facts.kind is FailureKind.EXIT:
        unknown = facts.code == UNKNOWN_CODE and rule.text != ""
        return not rule.codes or unknown or facts.code in rule.codes
    if facts.kind is FailureKind.SIGNAL:
        name = signal_name(facts.code)
        if rule.signals or not rule.text:
            return not rule.signals or name in rule.signals
        return name in _OF_THE_PROCESS
    return True


def _fact(rule: Rule, facts: Facts) -> str:
    """Return the last fact about the node that matches ``rule``; empty if none does."""
    return next((fact for fact in reversed(facts.node) if occurs(rule.facts, fact.lower())), "")


def _subject(rule: Rule, facts: Facts) -> str:
    found = search(rule.subject, facts.text) if rule.subject else None
    return next((group for group in found.groups() if group), "") if found else ""


# ---- words


def _verdict(failure: Failure, reading: Interpretation) -> Verdict:
    facts, rule = reading.facts, reading.rule
    fields = {
        "error": facts.error,
        "code": facts.code if failure.exit_code is None else failure.exit_code,
        "signal": f"{signal_name(facts.code)} (signal {facts.code})",
        "place": facts.place,
        "subject": "",
    }
    fields["subject"] = _subject(rule, facts) or rule.otherwise.format(**fields)
    return Verdict(
        title=printable(_title(failure, facts, rule.title.format(**fields))),
        origin=rule.origin,
        hopeless=rule.action is Action.STOP,
        evidence="\n".join(map(printable, _evidence(facts, rule).split("\n"))),
        advice=printable(rule.advice.format(**fields)),
        signature=_signature(failure, facts, rule),
        cause=rule.cause,
        action=rule.action,
        echo=rule.echo,
    )


def _title(failure: Failure, facts: Facts, title: str) -> str:
    what, _, why = title.partition(": ")
    if failure.handled_signal:
        ended = f"left with exit code {failure.exit_code}"
        ended = (
            ended
            if failure.exit_code is not None
            else f"ended itself with {signal_name(failure.signal or 0)}"
        )
        what, why = ended, f"it {what}, which its program handles"
    elif facts.kind is FailureKind.SIGNAL and failure.kind is FailureKind.EXIT:
        what, why = f"left with exit code {failure.exit_code}", f"a program that it ran {what}"
    host = f" ({failure.hostname})" if failure.hostname else ""
    reported = facts.kind in (FailureKind.EXCEPTION, FailureKind.SPAWN, FailureKind.NODE)
    said = one_line(facts.message, _TITLE_LIMIT) if reported else ""
    if not said.endswith(".."):  # the title is a part of sentences
        said = said.removesuffix(".")
    what = what.replace(" ()", "")
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
    """Return what stderr says about a process that left no exception."""
    stderr = log.short(facts.stderr)
    said = last_match(rule.text, stderr) if rule.text else None
    if said:
        start = stderr.rfind("\n", 0, said.end()) + 1
        return one_line(stderr[start:].partition("\n")[0])
    if facts.frames:
        top, frame = facts.frames[-1], facts.frame
        return str(top) if frame is top else f"{top}, called at {frame}"
    lines = [line for line in facts.stderr.splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else "it wrote nothing"


def _signature(failure: Failure, facts: Facts, rule: Rule) -> str:
    if facts.kind is FailureKind.EXCEPTION:
        frame = facts.frame
        if frame is None:
            return f"exception:{facts.error}{_same_words(facts.message)}"
        return f"exception:{facts.error}:{frame.name}:{frame.function}:{frame.line}"
    known = f":{rule.cause}{_same_words(_subject(rule, facts))}" if rule.text else ""
    if failure.kind is FailureKind.SIGNAL:
        return f"signal:{signal_name(facts.code)}{':oom' if rule.oom_killed else ''}{known}"
    if failure.kind is FailureKind.EXIT:
        return f"exit:{failure.exit_code}{known}"
    return str(failure.kind.value)


def _same_words(text: str) -> str:
    """Return the part that messages of the same failure share, after a colon; empty for an empty text."""
    words = " ".join(_VARIES.sub("#", text.lower()).split())[:_SIGNATURE_LIMIT]
    return f":{words}" if words else ""


def _when(report: WorkerFailed) -> tuple[float, int, str]:
    failure = report.failure
    return failure.time, failure.rank, failure.id
