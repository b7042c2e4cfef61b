"""The Chinese pages say what the English ones say: the same headings, commands, programs and tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

slugify = pytest.importorskip("markdown.extensions.toc").slugify

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2[ ]*$\n?", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#+) +(.*?)(?: +\{ ?#([\w-]+) ?\})?$", re.MULTILINE)
MADE_BY_THE_CODE = {"events.md", "exit-codes.md", "settings.md", "metrics.md", "diagnosis.md"}
"""Pages that are mostly tables from the code's own sentences."""
FOR_CONTRIBUTORS = {"architecture.md", "job-directory.md"}
PAGES = sorted(
    page.name for page in DOCS.glob("*.md") if page.name not in MADE_BY_THE_CODE | FOR_CONTRIBUTORS
)

pages = pytest.mark.parametrize("page", PAGES)


def both(page: str) -> tuple[str, str]:
    return (DOCS / page).read_text(), (DOCS / "zh" / page).read_text()


def headings(text: str) -> list[tuple[int, str]]:
    """Levels and anchors."""
    found = HEADING.findall(FENCE.sub("", text))
    return [(len(marks), anchor or slugify(title, "-")) for marks, title, anchor in found]


def tables(text: str) -> list[int]:
    """Cells of each row of a table."""
    lines = FENCE.sub("", text).splitlines()
    return [re.sub(r"\\\||`[^`]*`", "", line).count("|") for line in lines if line.startswith("|")]


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
    assert tables(chinese) == tables(english)


@pages
def test_it_is_chinese(page: str) -> None:
    _, chinese = both(page)
    text = re.sub(r"`[^`]*`|\([^)]*\)", "", FENCE.sub("", chinese))
    letters = len(re.findall(r"[A-Za-z]", text))
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > letters / 3


def test_no_page_is_left_over() -> None:
    assert {page.name for page in (DOCS / "zh").glob("*.md")} == set(PAGES)
