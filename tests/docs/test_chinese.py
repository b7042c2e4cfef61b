"""The Chinese pages say what the English ones say: the same headings, commands, programs and tables."""

from __future__ import annotations

import hashlib
import re
from itertools import zip_longest
from pathlib import Path

import pytest

slugify = pytest.importorskip("markdown.extensions.toc").slugify

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[ ]*$\n?", re.MULTILINE | re.DOTALL)
CELL = re.compile(r"\|((?:\\.|`[^`]*`|[^|])*)(?=\|)")
CODE = re.compile(r"`[^`]+`")
PRINTED = re.compile(r"(?<![*\w])\*([A-Z][^*|]*\.)\*(?!\*)")
"""A sentence that the program prints, in italics."""
GENERATED = re.compile(r"<!-- table: ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
TRANSLATED = re.compile(r"<!-- table: ([\w-]+), translated: (\w+) -->")
"""A table that is written by hand from the generated one with this digest."""
HEADING = re.compile(r"^(#+) +(.*?)(?: +\{ ?#([\w-]+) ?\})?$", re.MULTILINE)
FOR_CONTRIBUTORS = {"architecture.md"}
PAGES = sorted(page.name for page in DOCS.glob("*.md") if page.name not in FOR_CONTRIBUTORS)

pages = pytest.mark.parametrize("page", PAGES)


def both(page: str) -> tuple[str, str]:
    return (DOCS / page).read_text(), (DOCS / "zh" / page).read_text()


def headings(text: str) -> list[tuple[int, str]]:
    """Levels and anchors."""
    found = HEADING.findall(FENCE.sub("", text))
    return [(len(marks), anchor or slugify(title, "-")) for marks, title, anchor in found]


def rows(text: str) -> list[list[str]]:
    """The cells of each row of a table."""
    lines = FENCE.sub("", text).splitlines()
    return [CELL.findall(line) for line in lines if line.startswith("|")]


def kept(row: list[str]) -> tuple[int, set[str], set[str], list[str], list[str]]:
    """What a translation keeps of a row: cells, code of the first cell and of all, numbers, and printed sentences."""
    text = re.sub(r"\]\([^)]*\)", "]", " | ".join(row))
    numbers = re.findall(r"\d[\d,.]*", CODE.sub("", text))
    return (
        len(row),
        set(CODE.findall(row[0])),
        set(CODE.findall(text)),
        sorted(number.replace(",", "").rstrip(".") for number in numbers),
        PRINTED.findall(text),
    )


def digest(table: str) -> str:
    return hashlib.sha256(table.encode()).hexdigest()[:8]


@pages
def test_the_headings_have_the_same_levels_and_anchors(page: str) -> None:
    english, chinese = both(page)
    assert headings(chinese)[1:] == headings(english)[1:]
    assert headings(chinese)[0][0] == headings(english)[0][0] == 1


@pages
def test_commands_programs_and_outputs_are_the_same(page: str) -> None:
    english, chinese = both(page)
    blocks = [[match[0] for match in FENCE.finditer(text)] for text in (english, chinese)]
    assert blocks[1] == blocks[0]


@pages
def test_the_tables_have_the_same_rows(page: str) -> None:
    english, chinese = both(page)
    for translated, row in zip_longest(rows(chinese), rows(english), fillvalue=[""]):
        assert kept(translated) == kept(row), translated[0]


@pages
def test_tables_of_the_code_have_not_changed_since_they_were_translated(page: str) -> None:
    english, chinese = both(page)
    assert TRANSLATED.findall(chinese) == [
        (name, digest(table)) for name, table in GENERATED.findall(english)
    ], f"translate what changed in docs/zh/{page}, and write the new digest there"


@pages
def test_it_is_chinese(page: str) -> None:
    _, chinese = both(page)
    text = PRINTED.sub("", re.sub(r"`[^`]*`|\([^)]*\)", "", FENCE.sub("", chinese)))
    letters = len(re.findall(r"[A-Za-z]", text))
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > letters / 3


def test_no_page_is_left_over() -> None:
    assert {page.name for page in (DOCS / "zh").glob("*.md")} == set(PAGES)
