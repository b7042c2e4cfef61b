#!/usr/bin/env python3
"""Write the tables of the documentation that come from the code: python scripts/docs_tables.py.

A page holds ``<!-- table: NAME -->`` and, further down, ``<!-- end -->``; what is between them is replaced.
A test fails when a page does not have what the code says.
"""

from __future__ import annotations

import ast
import enum
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

import msgspec

from dlrover.config import Settings
from dlrover.spec import events
from dlrover.spec.failure import Failure, FailureKind, Origin, Verdict
from dlrover.spec.job import Limits
from dlrover.spec.jobdir import JobDir
from dlrover.spec.outcome import Outcome

DOCS = Path(__file__).resolve().parent.parent / "docs"

_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

_FAILURE = Failure(
    id="", kind=FailureKind.SIGNAL, node_id=1, rank=8, local_rank=0, round=1, signal=9
)
_VERDICT = Verdict(
    title="rank 8 was killed by SIGKILL (signal 9) on node 1 (host1)", origin=Origin.INFRASTRUCTURE
)
_GONE = "it sent no heartbeat for 60 s"

SAMPLES: tuple[events.EventBody, ...] = (
    events.JobSubmitted("my-job", 2, 4),
    events.MasterRecovered(42),
    events.MasterAdopted(5, 4),
    events.NodeLaunched(4, replaces=1),
    events.NodeConnected(4, "host1"),
    events.NodeLost(1, _GONE),
    events.RoundOpened(2, "node 1 was lost", 3),
    events.RoundCompleted(2, 3, 24, 0.48),
    events.WorkerFailed(_FAILURE, _VERDICT),
    events.RestartDecided(1, f"node 1 was lost: {_GONE}"),
    events.Recovered(2, 5.31),
    events.NodeSucceeded(0),
    events.JobEnded(0, "All workers succeeded."),
)
"""One event of each type, for the example sentences."""


def updated(page: str) -> str:
    """The text of a page with its tables as the code has them."""
    return _TABLE.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", page)


def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field of a record, on one line; empty for a field without one."""
    module = ast.parse(Path(str(sys.modules[cls.__module__].__file__)).read_text())
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    docs: dict[str, str] = {}
    name = ""
    for statement in classes[cls.__name__].body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            docs[name] = ""
        elif name and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            docs[name] = _markdown(str(statement.value.value))
            name = ""
    return docs


def _markdown(doc: str) -> str:
    """A docstring on one line, with the code spans of Markdown."""
    return " ".join(doc.split()).replace("``", "`").replace("|", r"\|")


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(header)
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _limits() -> str:
    docs = field_docs(Limits)
    return _table(
        ("Setting", "Default", "Meaning"),
        ((f"`{f.name}`", f"{f.default:g}", docs[f.name]) for f in msgspec.structs.fields(Limits)),
    )


def _settings(prefix: str) -> Callable[[], str]:
    rows = [(f"`{n}`", doc) for n, doc in field_docs(Settings).items() if n.startswith(prefix)]
    return lambda: _table(("Setting", "Meaning"), rows)


def _events() -> str:
    samples = {type(sample): sample for sample in SAMPLES}
    rows = []
    for kind in get_args(events.EventBody):
        fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__)
        about = f"{_markdown(kind.__doc__)} *{samples[kind].sentence()}*"
        rows.append((f"`{kind.__struct_config__.tag}`", about, fields))
    return _table(("Type", "Meaning, and an example", "Fields"), rows)


def _record(cls: type[msgspec.Struct]) -> Callable[[], str]:
    docs = field_docs(cls)
    return lambda: _table(
        ("Field", "Meaning"),
        ((f"`{f.name}`", docs[f.name] or _choices(f.type)) for f in msgspec.structs.fields(cls)),
    )


def _choices(kind: object) -> str:
    """The values of an enumeration; empty for any other type."""
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        return ""
    *values, last = [f"`{member.value}`" for member in kind]
    return f"{', '.join(values)} or {last}"


def _job_directory() -> str:
    here = JobDir(Path())
    properties = {n: p for n, p in vars(JobDir).items() if isinstance(p, property)}
    rows = [(getattr(here, n).name, p.__doc__ or "") for n, p in properties.items()]
    rows.append((here.agent_log("<node>").name, JobDir.agent_log.__doc__ or ""))
    return _table(("File", "Content"), ((f"`{n}`", _markdown(doc)) for n, doc in sorted(rows)))


TABLES: dict[str, Callable[[], str]] = {
    "limits": _limits,
    "journal": _settings("journal"),
    "tls": _settings("tls_"),
    "events": _events,
    "failure": _record(Failure),
    "verdict": _record(Verdict),
    "outcome": _record(Outcome),
    "job-directory": _job_directory,
}


def main() -> None:
    """Write every page of the documentation anew."""
    for path in sorted(DOCS.glob("*.md")):
        page = path.read_text()
        path.write_text(updated(page))


if __name__ == "__main__":
    main()
