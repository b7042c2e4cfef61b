"""Excerpts of real failures, each with the cause that a person assigned."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dlrover.master.diagnosis_rules import table
from dlrover.spec.failure import Failure, FailureKind, Origin, Verdict


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One excerpt, in the fields of a failure's record."""

    source: str
    """Origin of the excerpt: ``owner/repository#number``."""
    exception: str = ""
    message: str = ""
    stderr: str = ""
    signal: int | None = None
    exit_code: int | None = None
    facts: tuple[str, ...] = ()
    """Facts about the node."""
    node: str = ""
    """What the platform reports about a lost node."""
    cause: str
    origin: Origin
    first: str = ""
    """First cause from the table of causes, if it was wrong."""

    def failure(self) -> Failure:
        """Return the excerpt as a failure's record."""
        kind = FailureKind.EXIT
        if self.node:
            kind = FailureKind.NODE
        elif self.exception:
            kind = FailureKind.EXCEPTION
        elif self.signal is not None:
            kind = FailureKind.SIGNAL
        return Failure(
            id=self.source,
            kind=kind,
            node_id=0,
            rank=0,
            local_rank=0,
            round=1,
            exit_code=self.exit_code,
            signal=self.signal,
            exception=self.exception,
            message=self.node or self.message,
            stderr_tail=self.stderr,
            node_facts=self.facts,
        )

    def verdict(self) -> Verdict:
        """Return the verdict of the table of causes."""
        return table().diagnose(self.failure())


class Log(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Output of a program, its launcher or its node."""

    id: str
    text: str
    cause: str
    """``a|b`` means that both are right."""
    origin: str
    """One origin, or several as in `cause`."""

    @property
    def causes(self) -> list[str]:
        """The right causes."""
        return self.cause.split("|")

    @property
    def origins(self) -> list[Origin]:
        """The right origins."""
        return [Origin(origin) for origin in self.origin.split("|")]


class _Logs(msgspec.Struct, frozen=True):
    log: tuple[Log, ...]


class _File(msgspec.Struct, frozen=True):
    case: tuple[Case, ...]


def read(path: Path) -> tuple[Case, ...]:
    """Return the cases in a TOML file, a list named ``case``."""
    return msgspec.toml.decode(path.read_bytes(), type=_File).case


def read_logs(path: Path) -> tuple[Log, ...]:
    """Return the logs in a TOML file, a list named ``log``."""
    return msgspec.toml.decode(path.read_bytes(), type=_Logs).log
