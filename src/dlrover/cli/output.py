"""Output forms of the ``dlrover`` commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from dlrover.errors import kind_of
from dlrover.spec.words import printable, printable_lines

T = TypeVar("T")
KIB = 1024
WIDTH = 80
"""Columns where nothing says how many there are."""


class Form(str, Enum):
    """Form of a command's output."""

    TEXT = "text"
    JSON = "json"


Output = Annotated[Form, typer.Option("--output", "-o", help="Form of the output.")]


class _Terminal(Console):
    """Console that shows a job's texts without what a terminal would obey: escape sequences, control characters."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Return the segments of what is shown."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable_lines(text), style)


def print_json(value: Any) -> None:
    """Print ``value`` as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(value)).decode())


def terminal() -> Console:
    """Return the console of standard output; what a job says is text there, never markup or an emoji's name."""
    console = _Terminal(markup=False, emoji=False)
    if console.width < 1:  # COLUMNS=0
        console.width = WIDTH
    return console


def print_line(text: str) -> None:
    """Print one line of what a job says at once, as on `terminal`, whatever the terminal's width."""
    print(printable(text), flush=True)


def show(
    value: T,
    output: Form,
    render: Callable[[T, Console], object],
    named: Callable[[T], object] = lambda value: value,
) -> None:
    """Print ``value`` as JSON, or as text by ``render``; ``named`` gives names to what has none on the wire."""
    if output is Form.JSON:
        print_json(named(value))
    else:
        render(value, terminal())


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print columns for people and for ``grep``; lines never break, whatever the terminal's width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print_line("  ".join(cells).rstrip())


def size(nbytes: float) -> str:
    """Return a number of bytes for people, such as ``33.0 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < KIB:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= KIB
    return f"{nbytes:.1f} TiB"


def write_file(option: str, path: str, text: str) -> None:
    """Write ``text`` to the file that ``option`` names.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise kind_of(error)(
            f"{option} {path} cannot be written: {error.strerror}; it takes the name of a file."
        ) from error
