"""Docstrings as the pages in docs/reference show them; mkdocs.yml names this extension of griffe."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import griffe

PAGES = Path(__file__).parents[1] / "docs/reference"
LITERAL = re.compile(r"^ *::\n|(?<=\S):(?=:$)", re.MULTILINE)
"""What tells reStructuredText, but not Markdown, that an indented block is code."""
NAME = re.compile(r"(?<!`)`(\w+)`(?!`)")


class Reference(griffe.Extension):
    """Links public names that docstrings mention; leaves out special methods without a docstring, and labels of fields."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the docstrings of a package that has been read."""
        doors = [pkg[page.stem] for page in PAGES.glob("*.md")]
        homes = [(name, f"{door.path}.{name}") for door in doors for name in door.exports or ()]
        several = Counter(name for name, _ in homes)
        _change(pkg, {name: home for name, home in homes if several[name] == 1})


def _change(item: griffe.Object, homes: dict[str, str]) -> None:
    if item.docstring is not None:
        text = LITERAL.sub("", item.docstring.value)
        item.docstring.value = NAME.sub(lambda found: _linked(found[1], item, homes), text)
    item.labels -= {"class-attribute", "instance-attribute"}
    for name, member in list(item.members.items()):
        if not isinstance(member, griffe.Object):
            continue
        if name.startswith("__") and name != "__init__" and member.docstring is None:
            item.del_member(name)
        else:
            _change(member, homes)


def _linked(name: str, item: griffe.Object, homes: dict[str, str]) -> str:
    code = f"`{name}`"
    return f"[{code}][{homes[name]}]" if name in homes and name != item.name else code
