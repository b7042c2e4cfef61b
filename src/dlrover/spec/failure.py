"""The record of one worker's failure, and the verdict that the master reaches on it."""

from __future__ import annotations

import enum

import msgspec

TEXT_LIMIT = 16_384
"""Characters kept of each text in a failure record: head and tail of longer ones.

A master holds the failures of an incident; of all but some of them it keeps less.
"""
NAME_LIMIT = 1024
"""The same of an exception's name, a host name, a path and an id."""

FACTS_LIMIT = 16
"""Facts about a node in one failure record."""
FACT_LIMIT = 300
"""Characters of each of them."""


def clip(text: str, limit: int = TEXT_LIMIT) -> str:
    """``text`` cut to ``limit`` characters, keeping a quarter from its head, the rest its tail.

    The end of a traceback or a log names the cause, so the tail gets the larger part.
    """
    if len(text) <= limit:
        return text
    note = f"\n... {len(text) - limit} characters left out ...\n"
    head = limit // 4
    return text[:head] + note + text[head + len(note) - limit :]


OWN_ENDS = frozenset({"SystemExit", "os._exit", "os.abort", "os.kill", "signal.raise_signal"})
"""What stands for the exception where a program ended its own process."""


class FailureKind(str, enum.Enum):
    """How a worker ended."""

    EXCEPTION = "exception"
    """An exception reached the top of the program (``exception``, ``message``, ``traceback``)."""
    EXIT = "exit"
    """The process left with a non-zero exit code and no recorded exception."""
    SIGNAL = "signal"
    """A signal ended the process (``signal``)."""
    SPAWN = "spawn"
    """The process could not be started (``message``)."""
    NODE = "node"
    """The whole node is lost (``message``: what the platform says of it)."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one failed worker, gathered on its node. Texts are at most `TEXT_LIMIT` long."""

    id: str
    """Unique: a report that is sent twice counts once."""
    kind: FailureKind
    node_id: int
    rank: int
    local_rank: int
    round: int
    pid: int = 0
    time: float = 0.0
    """Seconds since the epoch at which the process was seen to have ended."""
    exit_code: int | None = None
    signal: int | None = None
    exception: str = ""
    """Qualified name of the exception's type, for instance ``ValueError``; one of `OWN_ENDS` where the program
    ended itself, with the call in ``traceback``."""
    asked_by: int = 0
    """The signal from outside that the program handled shortly before; 0: there was none."""
    message: str = ""
    traceback: str = ""
    stderr_tail: str = ""
    """The last lines that the worker wrote to its standard error."""
    log_path: str = ""
    """The worker's standard error file on its node."""
    steps: int = 0
    """Optimizer steps that the process had completed."""
    first_step: int = -1
    """The number of the step that it began with, -1 where that is not known."""
    hostname: str = ""
    oom_killed: bool = False
    """The kernel's out-of-memory killer ended a process of this node's memory cgroup meanwhile."""
    reading: tuple[int, int, int] | None = None
    """The shard whose samples it read last: `data_key` of the data set, lane and position."""
    node_facts: tuple[str, ...] = ()
    """Lines about the node since the worker started: of the kernel's log, and where a disk is full.

    At most `FACTS_LIMIT`, each of at most `FACT_LIMIT` characters.
    """

    def bounded(self, limit: int = TEXT_LIMIT) -> Failure:
        """The same record with each text cut to ``limit`` characters, each name to `NAME_LIMIT`."""
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
    """Whose fault it is, as far as the evidence tells."""

    USER = "user code"
    INFRASTRUCTURE = "infrastructure"
    UNKNOWN = "undetermined"


class Action(str, enum.Enum):
    """The cheapest step that is enough to go on after a failure."""

    RESTART = "restart"
    """All workers start again, on the same nodes."""
    RESTART_FRESH = "restart_fresh"
    """The same; the failed node's workers start from processes that have loaded nothing yet."""
    RELAUNCH = "relaunch"
    """The node is given up and another one takes its place on another host."""
    MORE_MEMORY = "more_memory"
    """The node is launched again with more memory where the platform can do that, else a restart."""
    STOP = "stop"
    """The job ends: a restart would fail in the same way."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a failure means, in words for people and in facts for the restart policy."""

    title: str
    """One line: what happened, for instance ``rank 1 was killed by SIGKILL``."""
    origin: Origin
    hopeless: bool = False
    """A restart cannot help: the same program would fail in the same way."""
    evidence: str = ""
    """The line that the verdict rests on."""
    advice: str = ""
    """One sentence: what to do next."""
    signature: str = ""
    """Equal for failures that look the same; counts repeated failures."""
    cause: str = ""
    """What happened, as a name that stays the same: ``host_oom``; see the table of causes."""
    action: Action = Action.RESTART
    """What is enough to go on. Budgets may end the job all the same."""
    echo: bool = False
    """The failure may only follow from the end of another worker, or from being told to stop."""
