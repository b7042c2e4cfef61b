"""Content of a job's page, as plain values for JSON: the same for the live page and for the frozen one."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from dlrover import __version__
from dlrover.dashboard import page
from dlrover.dashboard.inspect import goodput as ledger, queries
from dlrover.dashboard.inspect.goodput import GoodputReport
from dlrover.dashboard.inspect.roles import RolesReport
from dlrover.data.machine.queue import ShardQueue
from dlrover.errors import ConfigurationError, DLRoverError
from dlrover.master.machine.diagnosis.diagnosis import root_cause
from dlrover.master.machine.goodput.roundtime import MICRO
from dlrover.rpc.messages import RanksReply, Status
from dlrover.spec import events
from dlrover.spec.activity import Activity
from dlrover.spec.events import Event, WorkerFailed
from dlrover.spec.jobdir import JobDir
from dlrover.spec.outcome import CAUSES, Goodput, IncidentCost, Outcome

ROWS = 64
"""Most nodes that are drawn: those with the most incidents, then the first ones."""
PARTS = 600
"""Parts of the time axis; the order of causes within a part is not drawn."""
EVENTS = 1000
"""Most events on the page: the latest ones."""
PARTITIONS = 64
"""Most partitions of a stream that are listed."""
PLACES = 8
"""Most checkpoint directories that are listed."""
STEPS = 50
"""Most steps of a directory: the newest ones."""
FIXED = {
    "version": __version__,
    "causes": [{"key": cause.value, "label": cause.label} for cause in CAUSES],
    "activities": [activity.name.lower() for activity in Activity],
}
"""What does not change while the program runs."""


def frozen(job_dir: JobDir, found: GoodputReport) -> str:
    """Return a job's page with its present content as one file, which refers to nothing outside itself."""
    try:
        happened = queries.events(job_dir)
    except ConfigurationError:
        happened = []
    return page.frozen(
        {
            **FIXED,
            "frozenAt": time.time(),
            "report": of_report(found, happened),
            "status": of_status(found.status),
            "checkpoints": of_checkpoints(job_dir),
        }
    )


def of_status(status: Status) -> dict[str, Any]:
    """Return a status with the names of all fields; its outcome without the workers' texts."""
    plain: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(status, outcome=None))
    plain["nodes"] = [msgspec.structs.asdict(node) for node in status.nodes]
    plain["processes"] = status.processes()
    if status.outcome is not None:
        plain["outcome"] = _outcome(status.outcome)
    return plain


def _outcome(outcome: Outcome) -> dict[str, Any]:
    plain = {name: getattr(outcome, name) for name in ("exit_code", "reason", "others", "skipped")}
    return {**plain, "advice": outcome.verdict.advice if outcome.verdict is not None else ""}


def of_roles(found: RolesReport, pages: Mapping[str, str]) -> dict[str, Any]:
    """Return a job's roles, with the id of the page of each role that has one, their weights and queues."""
    plain: dict[str, Any] = msgspec.to_builtins(found.status)
    for role in plain["roles"]:
        role["page"] = pages.get(role["name"], "")
    for name, queue in found.status.queues.items():
        plain["queues"][name] = msgspec.structs.asdict(queue)
    return {**plain, "outcome": _outcome(found.outcome) if found.outcome is not None else None}


def of_events(happened: Sequence[Event]) -> dict[str, Any]:
    """Return the latest events, and the number of earlier ones."""
    return {
        "events": [_event(event) for event in happened[-EVENTS:]],
        "earlier_events": max(0, len(happened) - EVENTS),
    }


def of_ranks(ranks: RanksReply) -> list[dict[str, Any]]:
    """Return what the ranks do: their steps, their current activity, and their seconds by activity."""
    return [
        {"rank": state.rank, "node": state.node, **msgspec.structs.asdict(state.worker)}
        for state in ranks.ranks
    ]


def of_report(found: GoodputReport, happened: Sequence[Event]) -> dict[str, Any]:
    """Return what a job's journal and its events tell."""
    return {
        "job": found.job,
        "dir": found.job_dir,
        "phase": found.phase,
        "submitted": found.submitted_at,
        "goodput": of_goodput(found.goodput),
        "timeline": _timeline(found),
        "rounds": [
            {"at": at, **msgspec.to_builtins(body)}
            for at, body in found.happened
            if isinstance(body, events.RoundCompleted)
        ],
        "incidents": _incidents(found),
        "plans": [msgspec.to_builtins(plan) for plan in found.plans],
        "datasets": [_dataset(queue) for queue in found.datasets.values()],
        **of_events(happened),
    }


def of_goodput(goodput: Goodput) -> dict[str, Any]:
    """Return the use of a job's time, in figures and words."""
    return {
        "ratio": goodput.goodput_ratio,
        "words": goodput.in_words(),
        "summary": ledger.summary(goodput),
        "wall": goodput.wall_seconds,
        "job": goodput.job_seconds,
        "nodes": goodput.nodes,
        "seconds": goodput.seconds,
        "notes": ledger.notes(goodput, ledger.Amounts(goodput.wall_seconds)),
    }


def _event(event: Event) -> dict[str, Any]:
    kind = event.body.__struct_config__.tag
    return {"seq": event.seq, "at": event.time, "kind": kind, "text": event.sentence()}


# ---- time


def _timeline(found: GoodputReport) -> dict[str, Any]:
    """Return the spans of the nodes: flat triples of start and length in milliseconds, and the cause's number."""
    since = round(found.submitted_at * MICRO)
    shown = _shown(found)
    ends = [spans[-1].until for node in shown if (spans := found.timeline.spans(node))]
    length = max([*ends, since + round(found.goodput.job_seconds * MICRO)]) - since
    return {
        "seconds": length / MICRO,
        "nodes": [
            {
                "id": node,
                "host": found.hostnames.get(node, ""),
                "spans": list(
                    itertools.chain.from_iterable(
                        (
                            (span.since - since) // 1000,
                            -(-(span.until - span.since) // 1000),
                            CAUSES.index(span.cause),
                        )
                        for span in found.timeline.spans(node, length // PARTS)
                    )
                ),
            }
            for node in shown
        ],
        "left_out": len(found.timeline.nodes) - len(shown),
    }


def _shown(found: GoodputReport) -> list[int]:
    """Return the nodes to draw, in order."""
    hit: dict[int, int] = defaultdict(int)
    for incident in found.goodput.incidents:
        hit[incident.node] += 1
    return sorted(sorted(found.timeline.nodes, key=lambda node: (-hit[node], node))[:ROWS])


# ---- incidents


def _incidents(found: GoodputReport) -> list[dict[str, Any]]:
    failed: dict[int, list[WorkerFailed]] = defaultdict(list)
    hangs: dict[int, events.HangFound] = {}
    for _, body in found.happened:
        if isinstance(body, WorkerFailed):
            failed[body.failure.round].append(body)
        elif isinstance(body, events.HangFound):
            hangs[body.round] = body
    return [
        _incident(incident, failed.get(incident.round, ()), hangs.get(incident.round))
        for incident in found.goodput.incidents
    ]


def of_incidents(outcome: Outcome) -> list[dict[str, Any]]:
    """Return the incidents of an ended job; that which ended it has its root cause."""
    failure, verdict = outcome.failure, outcome.verdict
    root = [] if failure is None or verdict is None else [WorkerFailed(failure, verdict)]
    found = outcome.goodput.incidents if outcome.goodput is not None else ()
    return [
        _incident(one, [each for each in root if each.failure.round == one.round], None)
        for one in found
    ]


def _incident(
    incident: IncidentCost, failed: Iterable[WorkerFailed], hang: events.HangFound | None
) -> dict[str, Any]:
    """Return an incident with the root cause of its round, its evidence and the advice."""
    shown: dict[str, Any] = {**msgspec.to_builtins(incident), "lost": incident.lost}
    reports = list(failed)
    if hang is not None:
        shown["hang"] = {"text": hang.sentence(), "groups": hang.groups, "file": hang.evidence}
    if reports and incident.kind.value == "training":
        root = root_cause(reports)
        verdict, failure = root.verdict, root.failure
        shown["root"] = {
            "title": verdict.title,
            "origin": verdict.origin.value,
            "cause": verdict.cause,
            "evidence": verdict.evidence,
            "advice": verdict.advice,
            "action": verdict.action.value,
            "rank": failure.rank,
            "node": failure.node_id,
            "host": failure.hostname,
            "log": failure.log_path,
            "detail": failure.traceback or failure.stderr_tail,
            "facts": failure.node_facts,
            "others": len(reports) - 1,
        }
    return shown


# ---- data


def _dataset(queue: ShardQueue) -> dict[str, Any]:
    """Return the progress of a dataset: of all its epochs, or of the partitions of a stream."""
    spec, of = queue.spec, queue.partitions
    number = max(of, default=0)
    return {
        "name": spec.name,
        "stream": queue.is_stream,
        "size": spec.size,
        "epochs": spec.epochs,
        "epoch": number,
        "shard": spec.shard,
        "workers": len(queue.workers),
        "skipped": len(queue.skipped),
        "partitions": [
            {
                "number": index,
                "begin": part.begin,
                "end": part.end,
                "acknowledged": part.acknowledged.count,
                "leased": part.leased.count,
                "skipped": part.skipped.count,
            }
            for index, part in sorted(of.items())[-PARTITIONS:]
        ],
    }


# ---- checkpoints


def of_checkpoints(job_dir: JobDir) -> list[dict[str, Any]]:
    """Return the directories that the job's program saves to, each with its stored steps, the newest first."""
    try:
        listed = job_dir.checkpoints.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [{"path": place, **_steps(place)} for place in listed.splitlines()[:PLACES]]


def _steps(place: str) -> dict[str, Any]:
    try:
        from dlrover.checkpoint.tools import tools  # noqa: PLC0415 - an extra

        found = tools.listing(place)
    except ModuleNotFoundError as error:
        problem = (
            f"The steps are not listed: the module {error.name} is missing, see dlrover[torch]."
        )
        return {"steps": [], "problem": problem}
    except (DLRoverError, OSError, ValueError) as error:  # the directory's name may be damaged
        return {"steps": [], "problem": str(error)}
    return {"steps": [msgspec.to_builtins(step) for step in found[:STEPS]], "problem": ""}
