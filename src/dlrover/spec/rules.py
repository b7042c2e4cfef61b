"""One row of the table of causes: the signs of a failure, and their meaning."""

from __future__ import annotations

import enum

import msgspec

from dlrover.spec.failure import Action, FailureKind, Origin

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
