"""One row of the table of causes: what a failure looks like, and what it means."""

from __future__ import annotations

import enum

import msgspec

from dlrover.spec.failure import Action, FailureKind, Origin

OF_WORKERS = (FailureKind.EXCEPTION, FailureKind.EXIT, FailureKind.SIGNAL)
"""How a worker that was started can fail."""


class OwnCode(str, enum.Enum):
    """How the user's own files took part in a failure."""

    ABSENT = "absent"
    """Not at all, as far as is known."""
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
    """Name of the cause: lower-case letters, digits and underscores. It never changes its meaning."""
    kinds: tuple[FailureKind, ...] = ()
    """Kinds of failure that the row is for. Empty: those that ``types``, ``codes`` and ``signals`` speak of, and
    all failures of workers where these are empty too."""
    types: tuple[str, ...] = ()
    """Names of exception types, without their modules. Asked of exceptions only."""
    codes: tuple[int, ...] = ()
    """Exit codes. Asked of exits only."""
    signals: tuple[str, ...] = ()
    """Names of signals, as SIGKILL. Asked of ends by a signal only."""
    text: str = ""
    """Regular expression, searched in the messages of the exception and of what it was raised from, in
    the end of stderr where there is no exception, or in what the platform says of a lost node."""
    facts: str = ""
    """Regular expression, searched in each fact about the node."""
    raised_in: str = ""
    """Regular expression, searched in the name of the file that raised the exception; the name is empty
    when the exception came up before the program's first line."""
    own_code: OwnCode = OwnCode.ABSENT
    """The least that the user's own files did: ``calls`` (one of them is in the traceback, or there is none) or
    ``raises`` (the innermost line is theirs, and raises; or the program left with the exit code by itself)."""
    before_first_step: bool = False
    """No optimizer step was completed."""
    oom_killed: bool = False
    """The kernel's out-of-memory killer struck meanwhile."""

    origin: Origin
    """Whose fault it is."""
    action: Action = Action.RESTART
    """The cheapest step that is enough to go on."""
    echo: bool = False
    """The failure may only follow from the end of another worker, or from being told to stop."""
    general: bool = False
    """The row only repeats how something ended: any other reading of the failure goes before it."""
    title: str
    """What happened to the rank, and after ``": "`` why: ``was ended by {signal}: it exceeded a limit``."""
    evidence: str = ""
    """Stands in for the evidence where the failure's own texts say nothing of its cause."""
    advice: str
    """One sentence: what to do next."""
    subject: str = ""
    """Regular expression whose first group that matched is what the advice speaks of."""
    otherwise: str = ""
    """What the advice speaks of where ``subject`` finds nothing."""

    def is_for(self, kind: FailureKind) -> bool:
        """Whether failures of a kind are the row's business."""
        if self.kinds:
            return kind in self.kinds
        named = {
            FailureKind.EXCEPTION: self.types,
            FailureKind.EXIT: self.codes,
            FailureKind.SIGNAL: self.signals,
        }
        return bool(named.get(kind)) if any(named.values()) else kind in OF_WORKERS
