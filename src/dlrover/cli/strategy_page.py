"""The page of ``dlrover strategy``: memory and speed of every strategy that fits, as one self-contained file."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlrover.planning.parallel.records import Prediction, Strategy
    from dlrover.planning.parallel.rules import PlannedJob

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 900, 460, 70, 50
_TICKS = 5
_ROWS = 20
"""Strategies of the table."""
_STYLE = """
:root{--back:#fff;--text:#1c2024;--soft:#60666d;--line:#dfe3e8;--dot:#4a7fc9;--best:#2f9e62}
@media (prefers-color-scheme:dark){:root{--back:#15181c;--text:#e6e8eb;--soft:#9aa2ab;--line:#30363d;
--dot:#8ab4f8;--best:#5fce92}}
body{background:var(--back);color:var(--text);font:15px/1.5 system-ui,sans-serif;max-width:65rem;
margin:2rem auto;padding:0 1rem}
svg{width:100%;height:auto}svg text{fill:var(--soft);font-size:12px}svg line{stroke:var(--line)}
.dot{fill:var(--dot);opacity:.5}.best{fill:var(--best)}.edge{fill:none;stroke:var(--best);stroke-width:2}
td,th{padding:.2rem .9rem .2rem 0;text-align:right}th{color:var(--soft);font-weight:500}
.bar{display:inline-block;width:10rem;height:.7rem;background:var(--line);text-align:left}
.bar i{display:block;height:100%;background:var(--dot)}
"""


def pareto(found: list[tuple[Strategy, Prediction]]) -> list[int]:
    """Return the indices of the strategies that none beats in both memory and speed, by memory."""
    order = sorted(
        range(len(found)), key=lambda at: (found[at][1].memory_gib, found[at][1].step_seconds)
    )
    kept: list[int] = []
    for at in order:
        if not kept or found[at][1].step_seconds < found[kept[-1]][1].step_seconds:
            kept.append(at)
    return kept


def render(job: PlannedJob, found: list[tuple[Strategy, Prediction]]) -> str:
    """Return the page, which refers to nothing outside itself."""
    cluster = job.cluster
    title = (
        f"{job.model.parameters / 1e9:.1f} B parameters on {cluster.size} x {cluster.accelerator}"
    )
    body = _picture(found) + _table(found) if found else "<p>No strategy fits.</p>"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title)}</h1>"
        f"<p>{job.global_batch} sequences of {job.sequence} tokens a step. Each dot is the fastest strategy of "
        f"one choice of tp, pp, cp and ep; on the line, none is both faster and smaller.</p>{body}</html>\n"
    )


def _picture(found: list[tuple[Strategy, Prediction]]) -> str:
    most = max(predicted.memory_gib for _, predicted in found) * 1.05
    fastest = max(predicted.tokens_per_second for _, predicted in found) * 1.05

    def at(index: int) -> tuple[float, float]:
        predicted = found[index][1]
        x = _LEFT + (_WIDTH - _LEFT) * predicted.memory_gib / most
        return x, (_HEIGHT - _BOTTOM) * (1 - predicted.tokens_per_second / fastest)

    edge = pareto(found)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">']
    for tick in range(_TICKS + 1):
        x = _LEFT + (_WIDTH - _LEFT) * tick / _TICKS
        y = (_HEIGHT - _BOTTOM) * (1 - tick / _TICKS)
        parts += [
            f'<line x1="{x:.0f}" y1="0" x2="{x:.0f}" y2="{_HEIGHT - _BOTTOM}"/>',
            f'<text x="{x:.0f}" y="{_HEIGHT - 30}" text-anchor="middle">{most * tick / _TICKS:.0f}</text>',
            f'<line x1="{_LEFT}" y1="{y:.0f}" x2="{_WIDTH}" y2="{y:.0f}"/>',
            f'<text x="{_LEFT - 6}" y="{y + 12:.0f}" text-anchor="end">{fastest * tick / _TICKS:,.0f}</text>',
        ]
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}">GiB on the fullest rank</text>')
    parts.append('<text x="4" y="14">tokens/s</text>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, edge))
    parts.append(f'<polyline class="edge" points="{line}"/>')
    for index, (one, predicted) in enumerate(found):
        x, y = at(index)
        kind = "best" if index in edge else "dot"
        words = f"{_name(one)}: {predicted.memory_gib:.1f} GiB, {predicted.tokens_per_second:,.0f} tokens/s"
        parts.append(
            f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(words)}</title></circle>'
        )
    return "".join(parts) + "</svg>"


def _table(found: list[tuple[Strategy, Prediction]]) -> str:
    most = max(predicted.memory_high for _, predicted in found)
    rows = [
        f"<tr><td>{escape(_name(one))}</td><td>{predicted.memory_gib:.1f}</td>"
        f'<td><span class="bar"><i style="width:{100 * predicted.memory_gib / most:.0f}%"></i></span></td>'
        f"<td>{predicted.tokens_per_second:,.0f}</td><td>{predicted.step_seconds:.2f}</td></tr>"
        for one, predicted in found[:_ROWS]
    ]
    head = "<tr><th>strategy</th><th>GiB</th><th></th><th>tokens/s</th><th>step (s)</th></tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _name(one: Strategy) -> str:
    stages = f"pp {one.pp}" if one.virtual == 1 else f"pp {one.pp} x {one.virtual}"
    return (
        f"dp {one.dp_replicate} x {one.dp_shard} (ZeRO {one.zero}), tp {one.tp}, {stages}, cp {one.cp}, "
        f"ep {one.ep}, micro-batch {one.micro_batch}, recompute {one.recompute}"
    )
