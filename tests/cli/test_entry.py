"""The programs ``dlrover-run`` and ``dlrover``, before any module of theirs is loaded."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrover import cli

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize(
    ("program", "module"),
    [("launcher", "dlrover.cli.run.run"), ("command", "dlrover.cli.main")],
)
def test_an_interrupt_while_modules_are_loaded_shows_no_traceback(
    program: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, module, SimpleNamespace(main=interrupted))
    assert getattr(cli, program)() == 130


def test_the_programs_load_nothing_before_they_can_be_interrupted() -> None:
    scripts = dict(
        re.findall(r'^(dlrover(?:-run)?) = "(.*)"$', PYPROJECT.read_text(), re.MULTILINE)
    )
    assert scripts == {"dlrover-run": "dlrover.cli:launcher", "dlrover": "dlrover.cli:command"}
    assert callable(cli.launcher)
    assert callable(cli.command)
