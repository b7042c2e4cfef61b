"""A job's goodput as files: one self-contained HTML page, or a trace for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from typing import Any

from dlrover.cli.inspect.goodput import (
    Amounts,
    GoodputReport,
    notes,
    percent,
    spent,
    steps_lost,
    summary,
)
from dlrover.cli.inspect.plans import PlanHistory, interval
from dlrover.cli.run.report import duration
from dlrover.master.machine.goodput.roundtime import MICRO
from dlrover.spec.outcome import Cause, IncidentCost, IncidentKind

ROWS = 64
"""Most nodes that are drawn: those with the most incidents, then the first ones."""

_WIDTH = 1000
"""Width of the time axis, in units of the drawing."""
_LEFT = 110
_ROW = 16
_GAP = 6
_TOP = 40
_SIZE_TOP = 26
_SIZE_HEIGHT = 70
_PARTS = 800
"""Parts of the time axis; the order of causes within a part is not drawn."""
_TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200)
_DAY = 86_400
_MOST_TICKS = 10

_MASTER = IncidentKind.MASTER

_NOTHING_MORE = re.compile(r"(?<=\w) 0 \w+$")
"""Pattern of a needless end, as in ``5 min 0 s``."""

COLOURS = {
    Cause.PRODUCTIVE: "#2f9e62",
    Cause.DATA: "#3aa6a6",
    Cause.EVAL: "#4a7fc9",
    Cause.CHECKPOINT_BLOCK: "#7d5fc4",
    Cause.COMPILE: "#5a56a8",
    Cause.START_UP: "#e0b23c",
    Cause.RENDEZVOUS: "#e08a3c",
    Cause.NODE_CHECK: "#a8794a",
    Cause.RECOMPUTED_STEPS: "#d9688a",
    Cause.FAULT_DETECTION: "#c9403f",
    Cause.WAITING_FOR_RESOURCES: "#9a86a0",
    Cause.DEGRADED: "#b5838d",
    Cause.IDLE: "#a9b0b8",
    Cause.SHUTDOWN: "#6f7780",
    Cause.NOT_MEASURED: "#d5d9de",
}

_STYLE = """
:root{--back:#fff;--text:#1c2024;--soft:#60666d;--line:#dfe3e8;--mark:#b3261e;--plan:#4a7fc9}
@media (prefers-color-scheme:dark){:root{--back:#15181c;--text:#e6e8eb;--soft:#9aa2ab;--line:#30363d;
--mark:#ff8a80;--plan:#8ab4f8}}
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;max-width:75rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2rem 0 .5rem}p{margin:.3rem 0}
.soft{color:var(--soft)}.big{font-size:2.6rem;font-weight:650;line-height:1.2}
.bar{display:flex;height:1.6rem;border-radius:.3rem;overflow:hidden;margin:.8rem 0}
.scroll{overflow-x:auto}svg{min-width:45rem;width:100%;height:auto;display:block}
svg text{fill:var(--soft);font-size:11px}svg .axis{stroke:var(--line)}
svg .row path{fill:none;stroke-width:16}svg .row:hover{opacity:.8}
svg .incident line{stroke:var(--mark);stroke-dasharray:3 3;opacity:.7}
svg .incident path{fill:var(--mark)}svg .size{fill:none;stroke:var(--text);stroke-width:2}
svg .plan line{stroke:var(--plan);stroke-dasharray:3 3;opacity:.7}svg .plan path{fill:var(--plan)}
svg .incident:hover line{opacity:1;stroke-dasharray:none}
table{border-collapse:collapse}td,th{padding:.2rem .9rem .2rem 0;text-align:left;vertical-align:top}
th{color:var(--soft);font-weight:500;border-bottom:1px solid var(--line)}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.key{display:inline-block;width:.8rem;height:.8rem;border-radius:.2rem;margin-right:.5rem}
"""


def render(found: GoodputReport) -> str:
    """Return the page, which refers to nothing outside itself."""
    goodput = found.goodput
    amount = Amounts(goodput.wall_seconds)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.submitted_at))
    nodes = f"{goodput.nodes} node{'' if goodput.nodes == 1 else 's'}"
    parts = [
        f"<h1>{escape(found.job)}</h1>",
        f"<p class=soft>{escape(found.phase)}, submitted {began}, {nodes}, "
        f"{duration(goodput.job_seconds)}</p>",
        f"<p class=big>{goodput.in_words()} goodput</p><p>{escape(summary(found))}</p>"
        if goodput.goodput_ratio is not None
        else f"<p class=big>{escape(summary(found))}</p>",
        _bar(found),
        _causes(found, amount),
        "<h2>Timeline</h2>",
        _timeline(found),
        *_size(found),
        "<h2>Incidents</h2>",
        _incidents(found, amount),
        *(f"<p class=soft>{escape(note)}</p>" for note in notes(goodput, amount)),
    ]
    return (
        '<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content="'
        f'width=device-width"><title>{escape(found.job)}: goodput</title><style>{_STYLE}</style>'
        f"</head><body>{''.join(parts)}</body></html>\n"
    )


def _bar(found: GoodputReport) -> str:
    wall = found.goodput.wall_seconds
    pieces = "".join(
        f'<div style="background:{COLOURS[cause]};width:{100 * seconds / wall:.3f}%" '
        f'title="{cause.label}: {percent(seconds / wall)}"></div>'
        for cause, seconds in spent(found.goodput)
    )
    return f"<div class=bar>{pieces}</div>"


def _causes(found: GoodputReport, amount: Amounts) -> str:
    wall = found.goodput.wall_seconds
    rows = "".join(
        f'<tr><td><span class=key style="background:{COLOURS[cause]}"></span>{cause.label}'
        f"<td class=number>{amount(seconds)}<td class=number>{percent(seconds / wall)}"
        for cause, seconds in spent(found.goodput)
    )
    return (
        f"<table><tr><th>Time of all nodes<th class=number>time<th class=number>share{rows}</table>"
    )


def _incidents(found: GoodputReport, amount: Amounts) -> str:
    if not found.goodput.incidents:
        return "<p>None.</p>"
    rows = "".join(
        f"<tr><td class=number>{number}<td>{_clock(incident.since)}"
        f"<td class=number>{incident.until - incident.since:.1f} s"
        f"<td class=number>{amount(incident.lost)}<td class=number>{steps_lost(incident)}"
        f"<td>{escape(incident.title)}<br><span class=soft>{_spent_on(incident, amount)}</span>"
        for number, incident in enumerate(found.goodput.incidents, 1)
    )
    return (
        "<table><tr><th class=number>#<th>began<th class=number>lasted<th class=number>cost"
        f"<th class=number>steps lost<th>what happened{rows}</table>"
    )


def _spent_on(incident: IncidentCost, amount: Amounts) -> str:
    parts = sorted(incident.seconds.items(), key=lambda part: -part[1])
    return ", ".join(f"{Cause(name).label} {amount(seconds)}" for name, seconds in parts)


def _clock(at: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at))


# ---- the drawing


class _Axis:
    """Time axis of the drawing."""

    def __init__(self, since: float, seconds: float) -> None:
        self.since = since
        self.seconds = max(seconds, 1e-6)

    def __call__(self, at: float) -> float:
        """Return the position of a time, given in seconds since the epoch."""
        return _LEFT + _WIDTH * (at - self.since) / self.seconds

    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and labels of ticks: time since the job's submission."""
        step = next((s for s in _TICKS if self.seconds / s <= _MOST_TICKS), 0)
        step = step or _DAY * -(-int(self.seconds) // (_DAY * _MOST_TICKS))
        places = range(0, int(self.seconds) + 1, step)
        return [(self(self.since + at), _NOTHING_MORE.sub("", duration(at))) for at in places]


def _timeline(found: GoodputReport) -> str:
    shown = _shown(found)
    axis = _axis(found)
    height = _TOP + len(shown) * (_ROW + _GAP) + _GAP
    ticks = "".join(
        f'<line class=axis x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{height}"/>'
        f'<text x="{x:.1f}" y="12" text-anchor="middle">{name}</text>'
        for x, name in axis.ticks()
    )
    rows = "".join(_row(found, axis, node, place) for place, node in enumerate(shown))
    marks = "".join(
        _mark(axis, number, incident, height)
        for number, incident in enumerate(found.goodput.incidents, 1)
    )
    left_out = len(found.timeline.nodes) - len(shown)
    note = f"<p class=soft>{left_out} more nodes are not drawn.</p>" if left_out else ""
    return (
        f'<div class=scroll><svg viewBox="0 0 {_LEFT + _WIDTH + 30} {height}" role=img '
        f'aria-label="Time of each node by cause">{ticks}{rows}{marks}</svg></div>{note}'
    )


def _size(found: GoodputReport) -> list[str]:
    """Return the chart of nodes over time; empty if their number never changed and no plan exists."""
    if not found.plans and len({nodes for _, nodes in found.sizes}) < 2:
        return []
    return ["<h2>Nodes</h2>", _drawing(found), *([_plans(found.plans)] if found.plans else [])]


def _drawing(found: GoodputReport) -> str:
    """Return a line of the number of nodes, with a mark for each plan."""
    sizes, place = found.sizes, _axis(found)
    if not sizes:
        return "<p>None yet.</p>"
    left, right = _LEFT, _LEFT + _WIDTH
    most = max(nodes for _, nodes in sizes)
    bottom = _SIZE_TOP + _SIZE_HEIGHT

    def height(nodes: int) -> float:
        return bottom - _SIZE_HEIGHT * nodes / most

    path = f"M{place(sizes[0][0]):.1f} {height(sizes[0][1]):.1f}"
    for at, nodes in sizes[1:]:
        path += f"H{place(at):.1f}V{height(nodes):.1f}"
    labels = "".join(
        f'<text x="{left - 10}" y="{height(nodes) + 4:.1f}" text-anchor="end">{nodes}</text>'
        for nodes in sorted({0, sizes[-1][1], most})
    )
    marks = "".join(_plan_mark(plan, place(plan.time), bottom) for plan in found.plans)
    return (
        f'<div class=scroll><svg viewBox="0 0 {right + 30} {bottom + 10}" role=img '
        f'aria-label="Number of nodes over time"><line class=axis x1="{left}" x2="{right}" '
        f'y1="{bottom}" y2="{bottom}"/>{labels}<path class=size d="{path}H{right}"/>{marks}</svg></div>'
    )


def _plan_mark(plan: PlanHistory, x: float, bottom: int) -> str:
    words = f"plan {plan.number}, {plan.kind.value}: {plan.reason}; {plan.outcome}"
    return (
        f"<g class=plan><title>{escape(words)}</title>"
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_SIZE_TOP - 8}" y2="{bottom}"/>'
        f'<path d="M{x - 6:.1f} {_SIZE_TOP - 20}h12l-6 11z"/></g>'
    )


def _plans(plans: Sequence[PlanHistory]) -> str:
    """Return the plans as a table: reason, prediction, measurement and outcome."""
    rows = "".join(
        f"<tr><td class=number>{plan.number}<td>{_clock(plan.time)}"
        f"<td class=number>{plan.before} &rarr; {plan.nodes}<td>{escape(plan.kind.value)}: "
        f"{escape(plan.reason)}<td>{_predicted(plan)}<td>{_measured(plan)}<td>{escape(plan.outcome)}"
        for plan in plans
    )
    return (
        "<table><tr><th class=number>plan<th>made<th class=number>nodes<th>why<th>predicted<th>measured"
        f"<th>outcome{rows}</table>"
    )


def _predicted(plan: PlanHistory) -> str:
    return "-" if plan.predicted is None else f"{interval(plan.predicted)} {escape(plan.unit)}"


def _measured(plan: PlanHistory) -> str:
    if plan.measured is None or plan.error is None:
        return "-"
    return f"{plan.measured:.3g} ({plan.error:+.0%})"


def _axis(found: GoodputReport) -> _Axis:
    spans = [found.timeline.spans(node)[-1:] for node in _shown(found)]
    last = max((span.until for few in spans for span in few), default=0) / MICRO
    return _Axis(found.submitted_at, max(last - found.submitted_at, found.goodput.job_seconds))


def _shown(found: GoodputReport) -> list[int]:
    """Return the nodes to draw, in order."""
    hit: dict[int, int] = defaultdict(int)
    for incident in found.goodput.incidents:
        hit[incident.node] += 1
    return sorted(sorted(found.timeline.nodes, key=lambda node: (-hit[node], node))[:ROWS])


def _row(found: GoodputReport, axis: _Axis, node: int, place: int) -> str:
    """Return one node: its name, and a line of strokes for each cause."""
    strokes: dict[Cause, list[str]] = defaultdict(list)
    times: dict[Cause, int] = defaultdict(int)
    for span in found.timeline.spans(node, round(axis.seconds * MICRO / _PARTS)):
        x, end = axis(span.since / MICRO), axis(span.until / MICRO)
        strokes[span.cause].append(f"M{x:.2f} 0H{end:.2f}")
        times[span.cause] += span.until - span.since
    wall = sum(times.values())
    words = ", ".join(f"{c.label} {percent(us / wall)}" for c, us in times.items())
    host = found.hostnames.get(node, "")
    paths = "".join(
        f'<path d="{"".join(parts)}" stroke="{COLOURS[c]}"/>' for c, parts in strokes.items()
    )
    y = _TOP + place * (_ROW + _GAP) + _ROW / 2 + _GAP
    return (
        f'<g class=row transform="translate(0 {y})"><title>{escape(f"node {node} {host}")}: {words}'
        f'</title><text x="{_LEFT - 10}" y="4" text-anchor="end">node {node}</text>{paths}</g>'
    )


def _mark(axis: _Axis, number: int, incident: IncidentCost, height: int) -> str:
    """Return an incident's mark above the rows, with a title that says what happened."""
    x = axis(incident.since)
    end = "the nodes were connected again" if incident.kind is _MASTER else "the next new step"
    lasted = f"{incident.until - incident.since:.1f} s until {end}"
    again = f", {incident.steps_lost} steps made again" if incident.steps_lost > 0 else ""
    words = escape(f"{number}. {incident.title}: {lasted}{again}.")
    return (
        f"<g class=incident><title>{words}</title>"
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{height}"/>'
        f'<path d="M{x - 6:.1f} {_TOP - 18}h12l-6 11z"/></g>'
    )


# ---- the trace


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
