"""The evaluation page: one file, no script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, EDGE = 760, 320, 50
COIN = 0.6931
"""The loss of somebody who says 50 % each time."""


def write(path: Path, curve: Sequence[Sequence[float]], messages: int, starts: Path) -> None:
    """Draw the loss before learning over the messages, with a line for each start of the workers.

    Args:
        path: the page, which is replaced in one instant.
        curve: sums of losses, right answers and messages, for parts of the stream that are equally long.
        messages: at the right end.
        starts: a file with one number a line: messages that the model knew when its workers began.
    """
    known = [row for row in curve if row[2]]
    top = max([COIN, *(row[0] / row[2] for row in known)]) * 1.1
    points = []
    for number, row in enumerate(curve):
        if row[2]:
            points.append(f"{_x((number + 0.5) / len(curve)):.1f},{_y(row[0] / row[2] / top):.1f}")
    learned, right = (int(sum(row[column] for row in known)) for column in (2, 1))
    began = [int(line) for line in starts.read_text().split()]
    lines = "".join(
        f'<line x1="{_x(at / messages):.1f}" x2="{_x(at / messages):.1f}" y1="{EDGE}" y2="{HEIGHT - EDGE}"'
        ' class="start"/>'
        for at in began[1:]
    )
    coin = _y(COIN / top)
    text = f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Clicks: progressive validation</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: {WIDTH}px; margin: 2rem auto; color: #222; }}
svg {{ width: 100%; }} text {{ font-size: 12px; fill: #555; }}
.loss {{ fill: none; stroke: #0b62a4; stroke-width: 2; }} .axis {{ stroke: #999; }}
.coin {{ stroke: #999; stroke-dasharray: 2 4; }} .start {{ stroke: #c33; stroke-dasharray: 6 4; }}
</style>
<h1>Progressive validation</h1>
<p>Each message was predicted before the model learned from it. It has learned from {learned:,} messages, and
was right about {right / max(1, learned):.1%} of them. Its workers began {len(began)} times; red lines are restarts.</p>
<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Loss over messages">
<line x1="{EDGE}" x2="{WIDTH - EDGE}" y1="{HEIGHT - EDGE}" y2="{HEIGHT - EDGE}" class="axis"/>
<line x1="{EDGE}" x2="{EDGE}" y1="{EDGE}" y2="{HEIGHT - EDGE}" class="axis"/>
<line x1="{EDGE}" x2="{WIDTH - EDGE}" y1="{coin:.1f}" y2="{coin:.1f}" class="coin"/>
<text x="{WIDTH - EDGE + 4}" y="{coin + 4:.1f}">coin</text>
<text x="{EDGE - 8}" y="{EDGE + 4}" text-anchor="end">{top:.2f}</text>
<text x="{EDGE - 8}" y="{HEIGHT - EDGE + 4}" text-anchor="end">0</text>
<text x="{WIDTH - EDGE}" y="{HEIGHT - EDGE + 20}" text-anchor="end">{messages:,} messages</text>
<text x="{EDGE}" y="{EDGE - 12}">loss of the prediction (natural logarithm)</text>
{lines}<polyline class="loss" points="{" ".join(points)}"/>
</svg></html>
"""
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.replace(path)


def _x(share: float) -> float:
    return EDGE + share * (WIDTH - 2 * EDGE)


def _y(share: float) -> float:
    return HEIGHT - EDGE - share * (HEIGHT - 2 * EDGE)
