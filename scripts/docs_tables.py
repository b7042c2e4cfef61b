#!/usr/bin/env python3
"""Write the tables of the documentation that come from the code: python scripts/docs_tables.py.

A page holds ``<!-- table: NAME -->`` and, further down, ``<!-- end -->``; what is between them is replaced.
A test fails when a page does not have what the code says.
"""

from __future__ import annotations

import ast
import contextlib
import enum
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

import msgspec

from dlrover.config import Settings
from dlrover.master.diagnosis_rules import built_in
from dlrover.master.journal.file import FileJournal
from dlrover.master.journal.history import History
from dlrover.master.service import Master
from dlrover.master.views.metrics import metrics
from dlrover.spec import events
from dlrover.spec.check import Component, FindingKind
from dlrover.spec.failure import Action, Failure, FailureKind, Origin, Rule, Verdict
from dlrover.spec.job import Limits
from dlrover.spec.jobdir import JobDir
from dlrover.spec.outcome import Cause, Goodput, IncidentCost, Outcome
from dlrover.spec.plan import Effect, ScaleKind

DOCS = Path(__file__).resolve().parent.parent / "docs"

_TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

_FAILURE = Failure(
    id="", kind=FailureKind.SIGNAL, node_id=1, rank=8, local_rank=0, round=1, signal=9
)
_VERDICT = Verdict(
    title="rank 8 was killed by SIGKILL (signal 9) on node 1 (host1)", origin=Origin.INFRASTRUCTURE
)
_EFFECT = Effect(throughput=3320.0, low=2090.0, high=4510.0, before=1790.0, cost=4.0)
_GONE = "it sent no heartbeat for 60 s"

SAMPLES: tuple[events.EventBody, ...] = (
    events.JobSubmitted("my-job", 2, 4),
    events.MasterRecovered(42),
    events.MasterAdopted(5, 4),
    events.NodeLaunched(4, replaces=1),
    events.SparesDecided(1, 2, 128, 0.0031, 900.0),
    events.SpareReady(5),
    events.SpareTakesPlace(5, 2),
    events.NodeWaits(
        4, "Pod train-edljob-worker-4 waits: 0/9 nodes are available: 9 Insufficient nvidia.com/gpu"
    ),
    events.NodeConnected(4, "host1"),
    events.NodeLost(1, _GONE),
    events.JobScaled(2, 4, "user", "dlrover scale"),
    events.NodeReleased(3, "its agent ended: exit code 0"),
    events.RoundOpened(2, "node 1 was lost", 3),
    events.NodeCheckStarted(4, "the job starts"),
    events.NodeCheckFinding(FindingKind.FAULT, (3,), Component.DISK, "Input/output error", (3,)),
    events.NodeCheckFinished(4, 1, 2, 5.2),
    events.RoundCompleted(2, 3, 24, 0.48),
    events.WorkerFailed(_FAILURE, _VERDICT),
    events.InstanceStarted(3, "ps", 1, 2),
    events.InstanceRestarts(3, "ps", 1, 1, "it was killed by SIGKILL"),
    events.InstanceStuck("rollout", 1, "work", 61.0),
    events.InstanceEnded("rollout", 1, "it was killed by SIGKILL"),
    events.KeeperEnded("", "it was killed by SIGKILL", {"weights": "7"}, {}),
    events.RolesSubmitted("grpo", ("trainer", "rollout", "main")),
    events.CoordinatorRecovered(42),
    events.RoleStarts("rollout", 2),
    events.RoleRestarts("rollout", "its dlrover-run was killed by SIGKILL"),
    events.RoleEnded("rollout", 3, "its dlrover-run was killed by SIGKILL."),
    events.RestartDecided(1, f"node 1 was lost: {_GONE}"),
    events.ReplicaJoined(2, 4),
    events.HostExcluded(
        "host1", 3600.0, "rank 8 lost its device to a hardware error on node 1 (host1)"
    ),
    events.HangFound(
        2,
        (17,),
        "__getitem__ (data.py:41)",
        "62 ranks in all_reduce (distributed_c10d.py:2800); rank 17 in __getitem__ (data.py:41)",
        191.0,
        "evidence/1.txt",
    ),
    events.SlowRank(17, 2, 1.42, "data"),
    events.SlowRankRecovered(17, 2),
    events.SamplesSkipped(
        "clicks", 0, 4711, 4712, "offset 4711 of partition 0: ValueError: not JSON"
    ),
    events.StrategyChosen(2, 6, "dp 3 x tp 2", 0.41, "a step is 18% faster than with dp 6"),
    events.Recovered(2, 5.31),
    events.StepsUndone(2, 412, 400),
    events.StepStored("/data/checkpoints", 1200, "dlrover ckpt save"),
    events.NodeSucceeded(0),
    events.HotServer(0, 1.62, 1.09, 5),
    events.SlotsRestored(1, 512, 400),
    events.FirstSize(
        4, "started from 2 similar past jobs, the nearest is my-job (similarity 1.00)"
    ),
    events.MemoryGrows(3, 28 << 30, 16 << 30, 720.0, ordered=True, given=32 << 30),
    events.MemoryBound(3, 2.0),
    events.NodeMigrates(
        3, 5, "it is expected to need 28.0 GiB of memory within 12 min, and has 16.0 GiB"
    ),
    events.MigrationEnded(3, 5, "it did not come within 600 s (join_timeout)"),
    events.PlanMade(
        2, ScaleKind.GROW, 4, 2, "2 -> 4 nodes: +86% throughput for +100% cost", _EFFECT
    ),
    events.PlanMeasured(2, 4, 3180.0, -0.04, within=True, short=False),
    events.PlanDropped(2, "its effect could not be measured within 900 s (autoscale_patience)"),
    events.SizeSettled(4, 3180.0, 3),
    events.AutoScalingEnded("a user asked for 3 nodes"),
    events.JobEnded(0, "All workers succeeded."),
)
"""One event of each type, for the example sentences."""


def updated(page: str) -> str:
    """The text of a page with its tables as the code has them."""
    return _TABLE.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n{m[3]}", page)


def field_docs(cls: type) -> dict[str, str]:
    """The docstring below each field or member of a class, on one line; empty where there is none."""
    module = ast.parse(Path(str(sys.modules[cls.__module__].__file__)).read_text())
    classes = {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
    docs: dict[str, str] = {}
    name = ""
    for statement in classes[cls.__name__].body:
        target = _target(statement)
        if target is not None:
            name = target
            docs[name] = ""
        elif name and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            docs[name] = _markdown(str(statement.value.value))
            name = ""
    return docs


def _target(statement: ast.stmt) -> str | None:
    """The name that a field of a record, or a member of an enumeration, gets here."""
    if isinstance(statement, ast.AnnAssign):
        target: ast.expr = statement.target
    elif isinstance(statement, ast.Assign):
        target = statement.targets[0]
    else:
        return None
    return target.id if isinstance(target, ast.Name) else None


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
        ((f"`{f.name}`", _value(f.default), docs[f.name]) for f in msgspec.structs.fields(Limits)),
    )


def _value(default: object) -> str:
    """A default as it is written in a configuration file, without the quotes of texts."""
    if default is msgspec.NODEFAULT:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, (int, float)) else str(default)


def _settings(prefix: str) -> Callable[[], str]:
    rows = field_docs(Settings).items()
    return lambda: _table(
        ("Setting", "Meaning"), ((f"`{n}`", doc) for n, doc in rows if n.startswith(prefix))
    )


def _causes() -> str:
    docs = field_docs(Cause)
    rows = ((c.label, f"`{c.value}`", docs[c.name]) for c in Cause)
    return _table(("Cause", "In JSON and metrics", "What is counted"), rows)


def _metrics() -> str:
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        journal, history = FileJournal(path / "journal"), History(path / "events")
        with contextlib.closing(journal), contextlib.closing(history):
            for family in metrics(Master(journal, history)):
                name = family.name + ("_total" if family.type == "counter" else "")
                known = family.samples[0].labels if family.samples else family._labelnames  # noqa: SLF001
                labels = "".join(f" `{label}`" for label in known)
                rows.append((f"`{name}`", family.type, labels.strip(), family.documentation))
    return _table(("Metric", "Type", "Label", "Meaning"), rows)


def _diagnosis_causes() -> str:
    """One line for each cause, in the order of the table; its rows' origins and actions."""
    rows: dict[str, list[Rule]] = {}
    for rule in built_in():
        rows.setdefault(rule.cause, []).append(rule)
    return _table(
        ("Cause", "What happened", "Fault", "Action"),
        (
            (
                f"`{cause}`",
                _in_words(of_cause[-1]),
                " or ".join(dict.fromkeys(rule.origin.value for rule in of_cause)),
                " or ".join(dict.fromkeys(f"`{rule.action.value}`" for rule in of_cause)),
            )
            for cause, of_cause in rows.items()
        ),
    )


def _in_words(rule: Rule) -> str:
    """A row's title without its fields."""
    title = rule.title.replace(" ({error})", "").replace(" (exit code {code})", "")
    return title.format(
        error=" or ".join(rule.types) or "any other exception",
        signal=" or ".join(rule.signals) or "any other signal",
        code="other than 0",
    )


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


def _actions() -> str:
    module = ast.parse(Path(str(sys.modules[Action.__module__].__file__)).read_text())
    body = next(n.body for n in module.body if isinstance(n, ast.ClassDef) and n.name == "Action")
    docs = [ast.literal_eval(n.value) for n in body[1:] if isinstance(n, ast.Expr)]
    pairs = zip(Action, docs, strict=True)
    return _table(("Action", "Meaning"), ((f"`{a.value}`", _markdown(doc)) for a, doc in pairs))


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
    "metrics-settings": _settings("metrics_"),
    "optimize-mode": _settings("optimize_mode"),
    "causes": _causes,
    "goodput": _record(Goodput),
    "incident": _record(IncidentCost),
    "metrics": _metrics,
    "rules-setting": _settings("diagnosis_rules"),
    "diagnosis-causes": _diagnosis_causes,
    "rule": _record(Rule),
    "action": _actions,
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
