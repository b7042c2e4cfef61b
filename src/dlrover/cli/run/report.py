"""The last screen: the end of a job in words, and the same as JSON.

The screen fits on one terminal page, so that nothing important scrolls away: the verdict comes first,
then the evidence, the end of the traceback or of stderr, and what to do next. Control characters in
the workers' texts are removed.
"""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from dlrover.master.machine.diagnosis.traceback import is_user_file
from dlrover.spec.failure import Failure, FailureKind, Origin
from dlrover.spec.words import counted, printable

if TYPE_CHECKING:
    from dlrover.spec.outcome import Outcome

SCREEN_ROWS = 45
"""Most rows of the whole screen; lines that the terminal wraps count as several."""

MINIMUM_WIDTH = 40
"""Columns assumed for a terminal that claims fewer."""

_STDERR_LINES = 20
_OTHERS = 9
"""Lines about other ranks: those that the master names, and its count of the rest."""
_FIELD_ROWS = 3
"""Most rows of one labelled field."""
_LABEL = 10
"""Columns of the labels."""
_STYLES = {Origin.USER: "yellow", Origin.INFRASTRUCTURE: "magenta", Origin.UNKNOWN: "cyan"}


def render(outcome: Outcome, *, width: int, colour: bool) -> str:
    """Return the last screen, without a final newline.

    Args:
        outcome: The job's end.
        width: Columns of the terminal, used to count rows. Lines stay whole: the terminal wraps them, and
            people can copy them.
        colour: True to add terminal colours.
    """
    columns = max(width, MINIMUM_WIDTH)
    lines = _success(outcome) if outcome.exit_code == 0 else _failure(outcome, columns)
    screen = io.StringIO()
    console = Console(
        file=screen,
        width=columns,
        force_terminal=colour,
        color_system="standard" if colour else None,
        no_color=not colour,
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    return screen.getvalue().removesuffix("\n")


def render_json(outcome: Outcome) -> str:
    """Return the outcome as one JSON object, with the field names of `Outcome`."""
    return json.dumps(msgspec.to_builtins(outcome), indent=2)


def _success(outcome: Outcome) -> list[Text]:
    rest = f": {_totals(outcome)}. Job directory: {printable(outcome.job_dir)}"
    line = Text.assemble(("The job succeeded", "bold green"), rest)
    skipped = [_field("Data", words) for words in outcome.skipped]
    return [line, *skipped, *(_field("Goodput", words) for words in _goodput(outcome))]


def _failure(outcome: Outcome, columns: int) -> list[Text]:
    """Return the lines for a job that failed or was stopped."""
    head = [line for text, rows in _head(outcome) if (line := _fit(text, rows, columns))]
    foot = [line for text, rows in _foot(outcome) if (line := _fit(text, rows, columns))]
    free = SCREEN_ROWS - 2 - _rows(head, columns) - _rows(foot, columns)
    detail = _tail(_detail(outcome.failure), free, columns) if outcome.failure else []
    blank = [Text()]
    return head + (blank + detail if detail else []) + blank + foot


def _head(outcome: Outcome) -> Iterator[tuple[Text, int]]:
    """Yield the first lines, each with the most rows that it may take."""
    verdict = outcome.verdict
    if verdict is None:
        yield Text(printable(outcome.reason), style="bold red"), _FIELD_ROWS
        return
    yield Text(printable(verdict.title), style="bold red"), _FIELD_ROWS
    yield _field("Fault", verdict.origin.value, _STYLES[verdict.origin]), 1
    if verdict.evidence:
        yield _field("Evidence", verdict.evidence.split("\n")[0]), _FIELD_ROWS


def _foot(outcome: Outcome) -> Iterator[tuple[Text, int]]:
    """Yield the last lines, each with the most rows that it may take."""
    failure, verdict = outcome.failure, outcome.verdict
    if failure is not None and failure.log_path:
        host = f" ({failure.hostname})" if failure.hostname else ""
        yield _field("Log", f"{failure.log_path} on node {failure.node_id}{host}"), _FIELD_ROWS
    for number, other in enumerate(outcome.others[:_OTHERS]):
        yield _field("" if number else "Others", other), 1
    if (
        outcome.seconds or outcome.verdict is not None
    ):  # else nothing is known of a job that was killed
        yield _field("Ended", f"{_reason(outcome)}{_totals(outcome)}"), _FIELD_ROWS
    for words in outcome.skipped:
        yield _field("Data", words), _FIELD_ROWS
    for words in _goodput(outcome):
        yield _field("Goodput", words), _FIELD_ROWS
    if verdict is not None and verdict.advice:
        yield _field("Next", verdict.advice, "bold"), _FIELD_ROWS
    if outcome.job_dir:
        yield _field("Job", outcome.job_dir), _FIELD_ROWS
        command = f"dlrover events --job-dir {shlex.quote(outcome.job_dir)}"
        yield _field("Events", command), _FIELD_ROWS


def _reason(outcome: Outcome) -> str:
    """Return what the outcome's reason adds to the first line, ready for more text to follow."""
    if outcome.verdict is None:
        return ""
    added = outcome.reason.removeprefix(outcome.verdict.title).lstrip("; ").rstrip(". ")
    return f"{added}; " if added else ""


def _totals(outcome: Outcome) -> str:
    """Return text such as ``120 steps in 3 min 20 s, 2 restarts``."""
    steps = counted(outcome.steps, "step")
    restarts = counted(outcome.restarts, "restart")
    return f"{steps} in {duration(outcome.seconds)}, {restarts}"


def _goodput(outcome: Outcome) -> Iterator[str]:
    """Yield ``93.1 %; the largest loss is start-up: 12 s of all nodes (4.2 %)`` if known."""
    goodput = outcome.goodput
    if goodput is None or not goodput.wall_seconds:
        return
    largest = goodput.largest_loss()
    loss = ""
    if largest is not None:
        cause, seconds = largest
        share = seconds / goodput.wall_seconds
        loss = (
            f"; the largest loss is {cause.label}: {duration(seconds)} of all nodes "
            f"({100 * share:.1f} %)"
        )
    yield f"{goodput.in_words()}{loss}"


# ---- the failure's own words


def _detail(failure: Failure) -> list[str]:
    """Return the traceback, or the end of stderr of a process that left none."""
    if failure.kind is FailureKind.EXCEPTION and failure.traceback:
        return _without_library_frames(_clean_lines(failure.traceback))
    lines = _clean_lines(failure.stderr_tail)[-_STDERR_LINES:]
    stream = "output" if failure.log_path.endswith("/stdout.log") else "error"
    return [f"The end of its standard {stream}:", *lines] if lines else []


_FRAME = re.compile(r'[ \t|+-]*File "(?P<file>[^"]+)", line \d+')


def _without_library_frames(lines: list[str]) -> list[str]:
    """Return a traceback in which each run of library frames is shortened."""
    shown: list[str] = []
    library: list[list[str]] = []
    for entry in _entries(lines):
        frame = _FRAME.match(entry[0])
        if frame and not is_user_file(frame["file"]):
            library.append(entry)
            continue
        # The frame that calls the user's code does not matter; the one that raised the exception does.
        shown += _shortened(library, keep_last=frame is None)
        shown += entry
        library = []
    return shown + _shortened(library, keep_last=True)


def _shortened(library: list[list[str]], *, keep_last: bool) -> list[str]:
    kept = library[-1:] if keep_last else []
    hidden = len(library) - len(kept)
    note = [f"  ... {counted(hidden, 'library frame')} ..."] if hidden else []
    return note + [line for entry in kept for line in entry]


def _entries(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield each frame with the source lines below it, and every other line on its own."""
    entry: list[str] = []
    for line in lines:
        below = entry and _FRAME.match(entry[0]) and line.startswith("    ")
        if below and not _FRAME.match(line):
            entry.append(line)
            continue
        if entry:
            yield entry
        entry = [line]
    if entry:
        yield entry


def _tail(lines: list[str], rows: int, columns: int) -> list[Text]:
    """Return the last of ``lines`` that fit into ``rows``, below a note on how many do not."""
    fitting = [_fit(Text(line), _FIELD_ROWS, columns) for line in lines]
    kept: list[Text] = []
    if _rows(fitting, columns) <= rows:
        return fitting
    for line in reversed(fitting):
        if _rows([line, *kept], columns) > rows - 1:
            break
        kept.insert(0, line)
    left_out = counted(len(lines) - len(kept), "line")
    return [Text(f"  ... {left_out} left out ..."), *kept]


# ---- lines and rows


def _clean_lines(text: str) -> list[str]:
    """Return the lines of ``text`` as a terminal shows them: a progress bar overwrites its line."""
    lines = [printable(line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n")]
    return [line.rstrip() for line in lines if line.strip()]


def _field(label: str, value: str, style: str = "") -> Text:
    name = f"{label}:" if label else ""
    return Text.assemble((name.ljust(_LABEL), "bold"), (printable(value), style))


def _fit(line: Text, rows: int, columns: int) -> Text:
    line.truncate(rows * columns, overflow="ellipsis")
    return line


def _rows(lines: Iterable[Text], columns: int) -> int:
    """Return the rows of the terminal that ``lines`` take."""
    return sum(max(1, -(-cell_len(line.plain) // columns)) for line in lines)


def duration(seconds: float) -> str:
    """Return a time in words: ``0.3 s``, ``42 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    whole = max(0, round(seconds))
    for unit, size, small, small_size in (
        ("d", 86_400, "h", 3_600),
        ("h", 3_600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small_size} {small}"
    return f"{whole} s" if whole else f"{max(0.0, seconds):.1g} s"
