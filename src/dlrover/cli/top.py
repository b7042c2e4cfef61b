"""``dlrover top``: a live table of a job's nodes and ranks on the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import signal
import sys
import termios
import tty
from collections import deque
from collections.abc import Callable, Iterator

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dlrover._util import procs
from dlrover.cli.run.progress import status_line
from dlrover.dashboard.inspect import queries
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.rpc import messages
from dlrover.rpc.client import MasterClient
from dlrover.spec.activity import Activity
from dlrover.spec.jobdir import JobDir
from dlrover.spec.words import counted, size

PAUSE = 1.0
"""Seconds between two looks at the job."""
KEYS = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"k": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"j": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down", b"r": "ranks", b"\t": "ranks", b"q": "quit", b"\x03": "quit",
}  # fmt: skip
"""What the keys do, by the bytes that a terminal sends for them."""
_KEY = re.compile(rb"\x1b\[[0-9;]*[A-Z~]|\x1bO[A-Z]|.", re.DOTALL)
"""What a terminal sends for one key."""
HELP = "q quit · ↑ ↓ move · r nodes or ranks"
AROUND = 5
"""Rows of the terminal that the table does not get: the status, its head, and the keys."""


class TopView(msgspec.Struct, frozen=True, kw_only=True):
    """What the screen shows of a job: its nodes or ranks, from a row on."""

    by_rank: bool = False
    first: int = 0
    """Number of the first row that is shown."""

    def after(self, key: str, rows: int, room: int) -> TopView:
        """Return the view after a key, of a table of ``rows`` rows with room for ``room``."""
        if key == "ranks":
            return TopView(by_rank=not self.by_rank)
        moved = {"up": -1, "down": 1, "page up": -room, "page down": room}.get(key, 0)
        return msgspec.structs.replace(self, first=max(0, min(self.first + moved, rows - room)))


def top(job_dir: JobDir, console: Console) -> None:
    """Show a job until it ends or ``q`` is pressed.

    Raises:
        ConfigurationError: this is no terminal, or the directory has no job.
        InfrastructureError: the job's master does not answer.
    """
    if not (sys.stdin.isatty() and console.is_terminal):
        raise ConfigurationError("dlrover top needs a terminal; dlrover status prints a job once.")
    view = TopView()
    with _keys() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            status, ranks = asyncio.run(_look(job_dir))
            while True:
                rows = len(ranks.ranks if view.by_rank else status.nodes)
                room = max(1, console.height - AROUND)
                live.update(render(status, ranks, view, room), refresh=True)
                pressed = key(PAUSE if status.outcome is None else None)
                if pressed == "quit":
                    return
                if not pressed:
                    break
                view = view.after(pressed, rows, room)


async def _look(job_dir: JobDir) -> tuple[messages.Status, messages.RanksReply]:
    """Return a job's status and ranks; without a master, the status at the end of its journal."""
    try:
        return await queries.ask(job_dir, _both)
    except (ConfigurationError, InfrastructureError):
        status = await asyncio.to_thread(queries.status, job_dir)
        return status.status, messages.RanksReply(status.status.round, ())


async def _both(master: MasterClient) -> tuple[messages.Status, messages.RanksReply]:
    return await master.status(), await master.ranks()


def render(status: messages.Status, ranks: messages.RanksReply, view: TopView, room: int) -> Group:
    """Return the screen: the job, a table of its nodes or ranks, and the keys."""
    table = _ranks(ranks, view, room) if view.by_rank else _nodes(status, view, room)
    total = len(ranks.ranks if view.by_rank else status.nodes)
    last = min(view.first + room, total)
    where = f"{view.first + 1} to {last} of " if total > room else ""
    kind = counted(total, "rank" if view.by_rank else "node")
    end = [Text(status.outcome.reason, style="bold")] if status.outcome is not None else []
    foot = Text(f"{where}{kind} · {HELP}", style="dim")
    return Group(Text(status.name, style="bold"), status_line(status), *end, table, foot)


def _nodes(status: messages.Status, view: TopView, room: int) -> Table:
    table = _table(
        ("node", "rank", "status", "doing", "steps", "memory", "cores", "accelerators", "host")
    )
    for node in status.nodes[view.first : view.first + room]:
        table.add_row(
            str(node.id),
            str(node.node_rank) if node.node_rank >= 0 else "-",
            Text(node.status, style="green" if node.connected else "red"),
            node.doing or "-",
            str(node.steps),
            _bar(node.memory / node.memory_limit, size(node.memory)) if node.memory_limit else "-",
            f"{node.cpu:.2f} of {node.cores:g}" if node.cores else "-",
            _bar(node.busy, f"{node.busy:.0%}") if node.busy >= 0 else "-",
            node.hostname or "-",
        )
    return table


def _ranks(ranks: messages.RanksReply, view: TopView, room: int) -> Table:
    table = _table(("rank", "node", "doing", "steps", "own step time", "waits for data"))
    for state in ranks.ranks[view.first : view.first + room]:
        worker = state.worker
        spent = sum(worker.seconds[Activity.STEP :])
        own = worker.compute or worker.seconds[Activity.STEP]
        doing = f"{Activity(worker.doing).name.lower()} {worker.since:.0f} s"
        table.add_row(
            str(state.rank),
            str(state.node),
            "ended" if worker.ended else doing,
            str(worker.steps),
            f"{1000 * own / worker.steps:.1f} ms" if worker.steps else "-",
            f"{worker.seconds[Activity.DATA] / spent:.1%}" if spent else "-",
        )
    return table


def _table(names: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in names:
        right = name in ("node", "rank", "steps", "cores", "own step time", "waits for data")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    return table


def _bar(share: float, words: str) -> Text:
    """Return a share as a bar of ten cells, red when little is left, and words."""
    full = round(10 * min(1.0, max(0.0, share)))
    style = "red" if share > 0.9 else "blue"
    return Text.assemble(("━" * full, style), ("━" * (10 - full), "dim"), f" {words}")


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float | None], str]]:
    """Read single keys from the terminal; give a function that waits for one, and names what it does.

    A terminal that is gone quits. SIGTERM ends the program in an orderly way, so that the terminal is as it was.
    """
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    pressed: deque[bytes] = deque()
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)

    def key(timeout: float | None) -> str:
        if not pressed:
            if not waiting.poll(None if timeout is None else 1000 * timeout):
                return ""
            pressed.extend(_KEY.findall(os.read(fd, 4096)))  # several if the screen was slow
        return KEYS.get(pressed.popleft(), "nothing") if pressed else "quit"

    ends = signal.signal(signal.SIGTERM, procs.leave)
    try:
        tty.setcbreak(fd)
        yield key
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, ends)
