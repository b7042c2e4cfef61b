"""The programs ``dlrover-run`` and ``dlrover``, before any module of theirs is loaded."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from dlrover import cli
from dlrover.cli.main import app, main
from dlrover.errors import ExitCode

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


def commands(group: Any, *path: str) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*path, name)
        yield from commands(command, *path, name) if hasattr(command, "commands") else ()


COMMANDS = list(commands(typer.main.get_command(app)))


def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *argv: str) -> str:
    monkeypatch.setattr(sys, "argv", ["dlrover", *argv])
    assert main() == ExitCode.USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_an_unknown_option_of_any_command_is_one_sentence(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refused(capsys, monkeypatch, *command, "--xyzzy")
    assert said == f"dlrover: No such option: --xyzzy; see dlrover {' '.join(command)} --help\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("stauts", "No such command 'stauts' (did you mean 'status', 'stacks'?); see dlrover --"),
        ("ckpt xyzzy", "No such command 'xyzzy'; see dlrover ckpt --help"),
        ("drain", "Missing argument 'node'; see dlrover drain --help"),
        ("goodput --html", "Option '--html' requires an argument; see dlrover --help"),
        ("doctor 1", "Got unexpected extra argument(s) (1); see dlrover doctor --help"),
        ("master --port 99999", "Invalid value for '--port': Input should be less than or equal"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(
    line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = refused(capsys, monkeypatch, *line.split())
    assert text.startswith(f"dlrover: {said}")
    assert text.count("\n") == 1
