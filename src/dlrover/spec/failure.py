"""A worker's failure, the master's verdict on it, and the rules that lead to verdicts."""

from __future__ import annotations

import enum

import msgspec

from dlrover.spec.numbers import Count, KnownCount

TEXT_LIMIT = 16_384
"""Characters kept of each text in a failure record: head and tail of longer ones.

A master holds the failures of an incident, most of them further shortened.
"""
NAME_LIMIT = 1024
"""Characters kept of an exception's name, a host name, a path and an id."""

FACTS_LIMIT = 16
"""Facts about a node in one failure record."""
FACT_LIMIT = 300
"""Characters of each fact."""


ENDED_WELL = "ended without an error"
"""End of a fact about the node in a failure: other ranks had done so before."""

NOT_JOINED = "did not join the collective: "
"""Beginning of a fact about the node in a failure on a collective: where ranks were that do not wait for others."""


def clip(text: str, limit: int = TEXT_LIMIT) -> str:
    """Cut ``text`` to ``limit`` characters: a quarter from its head, the rest from its tail.

    The tail gets the larger part because the end of a traceback or a log names the cause.
    """
    if len(text) <= limit:
        return text
    note = f"\n... {len(text) - limit} characters left out ...\n"
    head = limit // 4
    return text[:head] + note + text[head + len(note) - limit :]


OWN_ENDS = frozenset({"SystemExit", "os._exit", "os.abort", "os.kill", "signal.raise_signal"})
"""Values of ``Failure.exception`` if a program ended its own process."""


class FailureKind(str, enum.Enum):
    """Kind of a worker's end."""

    EXCEPTION = "exception"
    """An exception reached the top of the program (``exception``, ``message``, ``traceback``)."""
    EXIT = "exit"
    """The process left with a non-zero exit code and no recorded exception."""
    SIGNAL = "signal"
    """A signal ended the process (``signal``)."""
    SPAWN = "spawn"
    """The process could not be started (``message``)."""
    NODE = "node"
    """The whole node is lost (``message``: the platform's explanation)."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one failed worker, gathered on its node. Texts are at most `TEXT_LIMIT` long."""

    id: str
    """Unique id: a report that is sent twice counts once."""
    kind: FailureKind
    node_id: int
    rank: int
    local_rank: int
    round: int
    pid: int = 0
    attempt: KnownCount = -1
    """Earlier processes of the rank in this round, where the world goes on without lost ranks; -1 if unknown."""
    time: float = 0.0
    """When the process was seen to have ended, seconds since the epoch."""
    exit_code: int | None = None
    signal: int | None = None
    exception: str = ""
    """Qualified name of the exception's type, for instance ``ValueError``; one of `OWN_ENDS` if the program
    ended itself, with the call in ``traceback``."""
    handled_signal: int = 0
    """Signal from outside that the program handled shortly before; 0: none."""
    message: str = ""
    traceback: str = ""
    stderr_tail: str = ""
    """Last lines of the worker's standard error; of its standard output if only that explains its end."""
    log_path: str = ""
    """The file on its node that these lines are from."""
    steps: Count = 0
    """Optimizer steps that the process had completed."""
    first_step: KnownCount = -1
    """Number of the step that the process began with; -1 if unknown."""
    hostname: str = ""
    oom_killed: bool = False
    """True if the kernel's out-of-memory killer meanwhile ended a process in this node's memory cgroup."""
    reading: tuple[int, int, int] | None = None
    """Shard that the worker read last: `data_key` of the dataset, partition and position."""
    node_facts: tuple[str, ...] = ()
    """Lines about the node since the worker started: from the kernel's log, about full disks, and about ranks that
    ended without an error before it.

    At most `FACTS_LIMIT` lines of at most `FACT_LIMIT` characters each.
    """

    def bounded(self, limit: int = TEXT_LIMIT) -> Failure:
        """Return the record with each text cut to ``limit`` characters and each name to `NAME_LIMIT`."""
        texts = max(len(self.message), len(self.traceback), len(self.stderr_tail))
        names = max(len(self.id), len(self.exception), len(self.log_path), len(self.hostname))
        facts = max((len(fact) for fact in self.node_facts), default=0)
        few = len(self.node_facts) <= FACTS_LIMIT and facts <= FACT_LIMIT
        if texts <= limit and names <= NAME_LIMIT and few:
            return self
        return msgspec.structs.replace(
            self,
            id=clip(self.id, NAME_LIMIT),
            exception=clip(self.exception, NAME_LIMIT),
            log_path=clip(self.log_path, NAME_LIMIT),
            hostname=clip(self.hostname, NAME_LIMIT),
            message=clip(self.message, limit),
            traceback=clip(self.traceback, limit),
            stderr_tail=clip(self.stderr_tail, limit),
            node_facts=tuple(fact[:FACT_LIMIT] for fact in self.node_facts[:FACTS_LIMIT]),
        )


class Origin(str, enum.Enum):
    """Origin of a failure, as far as the evidence shows it."""

    USER = "user code"
    INFRASTRUCTURE = "infrastructure"
    UNKNOWN = "undetermined"


class Action(str, enum.Enum):
    """The cheapest sufficient action after a failure."""

    RESTART = "restart"
    """Restart all workers on the same nodes."""
    RESTART_FRESH = "restart_fresh"
    """Restart all workers on the same nodes; the failed node's start in fresh, not preloaded, processes."""
    RELAUNCH = "relaunch"
    """Give up the node; another node on another host takes its place."""
    MORE_MEMORY = "more_memory"
    """Launch the node again with more memory if the platform can, else restart the workers."""
    STOP = "stop"
    """End the job: a restart would fail in the same way."""


class Rung(str, enum.Enum):
    """What the job does after a fault, the cheapest first."""

    IN_PROCESS = "in_process"
    """Processes that are well go on; nothing of theirs starts again."""
    PROCESS = "process"
    """All workers start again on the same nodes, from processes that have loaded everything."""
    NODE = "node"
    """All workers start again on the same nodes; the failed node's from processes that have loaded nothing."""
    SPARE = "spare"
    """A spare takes the node's place."""
    ELSEWHERE = "elsewhere"
    """Another node takes the node's place once it has started."""
    SMALLER = "smaller"
    """The job goes on with fewer nodes."""
    END = "end"
    """The job ends."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Meaning of a failure, in words for people and in facts for the restart policy."""

    title: str
    """What happened, in one line, for instance ``rank 1 was killed by SIGKILL``."""
    origin: Origin
    hopeless: bool = False
    """True if a restart cannot help: the same program would fail in the same way."""
    evidence: str = ""
    """The line that the verdict rests on."""
    advice: str = ""
    """What to do next, in one sentence."""
    signature: str = ""
    """Equal for failures that look alike; used to count repeated failures."""
    cause: str = ""
    """Stable name of the cause, such as ``host_oom``; see the table of causes."""
    action: Action = Action.RESTART
    """Sufficient action after the failure. Budgets may end the job all the same."""
    echo: bool = False
    """True if the failure may only be a consequence of another worker's end or of a request to stop."""


OF_WORKERS = (FailureKind.EXCEPTION, FailureKind.EXIT, FailureKind.SIGNAL)
"""Kinds of failure of a started worker."""


class OwnCode(str, enum.Enum):
    """Part of the user's own files in a failure."""

    ABSENT = "absent"
    """No part, as far as is known."""
    CALLS = "calls"
    """A call from one of them led to it, or the exception has no traceback."""
    RAISES = "raises"
    """One of them raised the exception itself, left with the exit code, or sent itself the signal."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row. A condition that is left at its default holds for every failure.

    Regular expressions ignore case; ``^`` and ``$`` match at every line. ``title``, ``advice`` and
    ``otherwise`` are templates with these fields:

    ``{error}``    name of the exception's type, without its module
    ``{code}``     exit code
    ``{signal}``   ``SIGKILL (signal 9)``
    ``{place}``    ``train.py:12``, the innermost line of the user's own code
    ``{subject}``  what the row's ``subject`` finds, else its ``otherwise``
    """

    cause: str
    """Name of the cause: lower-case letters, digits and underscores. Its meaning never changes."""
    kinds: tuple[FailureKind, ...] = ()
    """Kinds of failure that the row applies to. Empty: those implied by ``types``, ``codes`` and ``signals``,
    or all failures of workers if these are empty too."""
    types: tuple[str, ...] = ()
    """Names of exception types, without their modules. Only for exceptions."""
    codes: tuple[int, ...] = ()
    """Exit codes. Only for exits."""
    signals: tuple[str, ...] = ()
    """Names of signals, such as SIGKILL. Only for ends by a signal."""
    text: str = ""
    """Regular expression, searched in the messages of the exception and of its causes, in the end of stderr
    if there is no exception, or in what the platform reports about a lost node."""
    facts: str = ""
    """Regular expression, searched in each fact about the node."""
    raised_in: str = ""
    """Regular expression, searched in the name of the file that raised the exception; the name is empty
    if the exception was raised before the program's first line."""
    own_code: OwnCode = OwnCode.ABSENT
    """Minimum part of the user's own files: ``calls`` (one of them is in the traceback, or there is none) or
    ``raises`` (the innermost line is theirs, and raises; or the program left with the exit code itself)."""
    before_first_step: bool = False
    """True: only if no optimizer step was completed."""
    oom_killed: bool = False
    """True: only if the kernel's out-of-memory killer struck meanwhile."""

    origin: Origin
    """Origin of the failure: ``user code``, ``infrastructure`` or ``undetermined``."""
    action: Action = Action.RESTART
    """The cheapest sufficient action."""
    echo: bool = False
    """True if the failure may only be a consequence of another worker's end or of a request to stop."""
    general: bool = False
    """True if the row only repeats how something ended; any other explanation takes precedence."""
    title: str
    """What happened to the rank, and after ``": "`` why: ``was ended by {signal}: it exceeded a limit``."""
    evidence: str = ""
    """Replacement for the evidence if the failure's own texts do not show its cause."""
    advice: str
    """What to do next, in one sentence."""
    subject: str = ""
    """Regular expression; its first matching group is the subject of the advice."""
    otherwise: str = ""
    """Subject of the advice if ``subject`` finds nothing."""

    def is_for(self, kind: FailureKind) -> bool:
        """Return whether the row applies to failures of a kind."""
        if self.kinds:
            return kind in self.kinds
        named = {
            FailureKind.EXCEPTION: self.types,
            FailureKind.EXIT: self.codes,
            FailureKind.SIGNAL: self.signals,
        }
        return bool(named.get(kind)) if any(named.values()) else kind in OF_WORKERS
