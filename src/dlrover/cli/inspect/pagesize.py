"""A job's size over time and its plans, as a section of its goodput page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape

from dlrover.cli.inspect.plans import PlanRecord, interval

Sizes = Sequence[tuple[float, int]]
"""Time at which each world was formed (seconds since the epoch), and its number of nodes."""

_TOP = 26
_HEIGHT = 70


def drawing(
    sizes: Sizes,
    plans: Sequence[PlanRecord],
    place: Callable[[float], float],
    ends: tuple[float, float],
) -> str:
    """Return a line of the number of nodes, with a mark for each plan.

    Args:
        sizes: the job's sizes.
        plans: the job's plans.
        place: returns the position of a time on the axis.
        ends: the left and the right end of the axis.
    """
    if not sizes:
        return "<p>None yet.</p>"
    left, right = ends
    most = max(nodes for _, nodes in sizes)
    bottom = _TOP + _HEIGHT

    def height(nodes: int) -> float:
        return bottom - _HEIGHT * nodes / most

    path = f"M{place(sizes[0][0]):.1f} {height(sizes[0][1]):.1f}"
    for at, nodes in sizes[1:]:
        path += f"H{place(at):.1f}V{height(nodes):.1f}"
    labels = "".join(
        f'<text x="{left - 10}" y="{height(nodes) + 4:.1f}" text-anchor="end">{nodes}</text>'
        for nodes in sorted({0, sizes[-1][1], most})
    )
    marks = "".join(_mark(plan, place(plan.time), bottom) for plan in plans)
    return (
        f'<div class=scroll><svg viewBox="0 0 {right + 30} {bottom + 10}" role=img '
        f'aria-label="How many nodes the job had when"><line class=axis x1="{left}" x2="{right}" '
        f'y1="{bottom}" y2="{bottom}"/>{labels}<path class=size d="{path}H{right}"/>{marks}</svg></div>'
    )


def _mark(plan: PlanRecord, x: float, bottom: int) -> str:
    words = f"plan {plan.number}, {plan.kind.value}: {plan.reason}; {plan.outcome}"
    return (
        f"<g class=plan><title>{escape(words)}</title>"
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom}"/>'
        f'<path d="M{x - 6:.1f} {_TOP - 20}h12l-6 11z"/></g>'
    )


def table(plans: Sequence[PlanRecord]) -> str:
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


def _predicted(plan: PlanRecord) -> str:
    return "-" if plan.predicted is None else f"{interval(plan.predicted)} {escape(plan.unit)}"


def _measured(plan: PlanRecord) -> str:
    if plan.measured is None or plan.error is None:
        return "-"
    return f"{plan.measured:.3g} ({plan.error:+.0%})"


def _clock(at: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at))
