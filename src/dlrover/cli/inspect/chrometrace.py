"""A job's timeline in the trace event format of chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from typing import Any

from dlrover.cli.inspect.goodput import Report
from dlrover.master.machine.goodput.roundtime import MICRO

_JOB = 0
"""Process id of the job in a trace; the job's nodes are threads."""


def render(found: Report) -> str:
    """Return the trace as JSON: a track for each node, with incidents and plans as instant events."""
    start = round(found.submitted_at * MICRO)
    events: list[dict[str, Any]] = [_name("process_name", found.job, 0)]
    for node in found.timeline.nodes:
        host = found.hostnames.get(node, "")
        events.append(_name("thread_name", f"node {node}{f' ({host})' if host else ''}", node))
        events += [
            {
                "ph": "X",
                "pid": _JOB,
                "tid": node,
                "ts": span.since - start,
                "dur": span.until - span.since,
                "name": span.cause.label,
                "cat": span.cause.value,
            }
            for span in found.timeline.spans(node)
        ]
    events += [
        {
            "ph": "i",
            "s": "g",
            "pid": _JOB,
            "tid": max(0, incident.node),
            "ts": round(incident.since * MICRO) - start,
            "name": incident.title or "incident",
            "cat": "incident",
            "args": {
                "lasted_seconds": incident.until - incident.since,
                "seconds_of_all_nodes": incident.seconds,
                "steps_lost": incident.steps_lost,
            },
        }
        for incident in found.goodput.incidents
    ]
    events += _sizes(found, start)
    other = {"job": found.job, "submitted_at": found.submitted_at}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def _sizes(found: Report, start: int) -> list[dict[str, Any]]:
    """Return the number of nodes as a counter, and the plans as instant events."""
    counted = [
        {
            "ph": "C",
            "pid": _JOB,
            "ts": round(at * MICRO) - start,
            "name": "nodes",
            "args": {"nodes": nodes},
        }
        for at, nodes in found.sizes
    ]
    planned = [
        {
            "ph": "i",
            "s": "g",
            "pid": _JOB,
            "tid": 0,
            "ts": round(plan.time * MICRO) - start,
            "name": f"plan {plan.number}: {plan.before} -> {plan.nodes} nodes",
            "cat": "plan",
            "args": {
                "why": f"{plan.kind.value}: {plan.reason}",
                "predicted": plan.predicted.throughput if plan.predicted else None,
                "measured": plan.measured,
                "unit": plan.unit,
                "outcome": plan.outcome,
            },
        }
        for plan in found.plans
    ]
    return counted + planned


def _name(kind: str, name: str, thread: int) -> dict[str, Any]:
    return {"ph": "M", "pid": _JOB, "tid": thread, "name": kind, "args": {"name": name}}
