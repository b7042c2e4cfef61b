"""A job's goodput as a trace for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from typing import Any

from dlrover.dashboard.inspect.goodput import GoodputReport
from dlrover.master.machine.goodput.roundtime import MICRO


def trace(found: GoodputReport) -> str:
    """Return a trace as JSON: a track for each node, with incidents and plans as instant events."""

    def event(kind: str, at: int, name: str, thread: int = 0, **fields: Any) -> dict[str, Any]:
        since = at - round(found.submitted_at * MICRO)
        return {"ph": kind, "pid": 0, "tid": thread, "ts": since, "name": name, **fields}

    def instant(at: float, name: str, category: str, thread: int, **args: Any) -> dict[str, Any]:
        return event("i", round(at * MICRO), name, thread, s="g", cat=category, args=args)

    def label(kind: str, name: str, thread: int = 0) -> dict[str, Any]:
        return {"ph": "M", "pid": 0, "tid": thread, "name": kind, "args": {"name": name}}

    events = [label("process_name", found.job)]
    for node in found.timeline.nodes:
        host = found.hostnames.get(node, "")
        events.append(label("thread_name", f"node {node}{f' ({host})' if host else ''}", node))
        events += [
            event(
                "X",
                span.since,
                span.cause.label,
                node,
                cat=span.cause.value,
                dur=span.until - span.since,
            )
            for span in found.timeline.spans(node)
        ]
    events += [
        instant(
            incident.since,
            incident.title or "incident",
            "incident",
            max(0, incident.node),
            lasted_seconds=incident.until - incident.since,
            seconds_of_all_nodes=incident.seconds,
            steps_lost=incident.steps_lost,
        )
        for incident in found.goodput.incidents
    ]
    events += [
        event("C", round(at * MICRO), "nodes", args={"nodes": nodes}) for at, nodes in found.sizes
    ]
    events += [
        instant(
            plan.time,
            f"plan {plan.number}: {plan.before} -> {plan.nodes} nodes",
            "plan",
            0,
            why=f"{plan.kind.value}: {plan.reason}",
            predicted=plan.predicted.throughput if plan.predicted else None,
            measured=plan.measured,
            unit=plan.unit,
            outcome=plan.outcome,
        )
        for plan in found.plans
    ]
    other = {"job": found.job, "submitted_at": found.submitted_at}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})
