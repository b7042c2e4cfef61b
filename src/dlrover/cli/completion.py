"""``dlrover completion``: a script with which a shell completes the words of both commands."""

from __future__ import annotations

import argparse
import contextlib
import enum
import os
import shlex
from collections.abc import Iterator
from typing import Annotated

import typer
from typer import completion as scripts

from dlrover import config

_BASH = """_dlrover_run() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    case $word in
        -*) COMPREPLY=( $(compgen -W {flags} -- "$word") ) ;;
        *) COMPREPLY=() ;;
    esac
}}
complete -o default -o bashdefault -F _dlrover_run dlrover-run
"""


class Shell(str, enum.Enum):
    """A shell that has completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="Shell whose script to print.")],
) -> None:
    """Print the completion of dlrover and dlrover-run for a shell, to load in its start-up file."""
    own = scripts.get_completion_script(  # type: ignore[attr-defined]
        prog_name="dlrover", complete_var="_DLROVER_COMPLETE", shell=shell.value
    )
    print(own)
    print(_launcher(shell), end="")


def _launcher(shell: Shell) -> str:
    actions = list(_actions())
    if shell is Shell.FISH:
        lines = (
            f"complete -c dlrover-run -l {flag.removeprefix('--')} -d {shlex.quote(help_)}\n"
            for flag, help_ in actions
        )
        return "".join(lines)
    head = "autoload -Uz bashcompinit && bashcompinit\n" if shell is Shell.ZSH else ""
    flags = shlex.quote(" ".join(flag for flag, _ in actions))
    return head + _BASH.format(flags=flags)


def _actions() -> Iterator[tuple[str, str]]:
    """Yield the long options of ``dlrover-run`` in one spelling each, with their help."""
    from dlrover.cli.run import arguments  # noqa: PLC0415 - slow to import

    for action in arguments.build_parser({})._actions:  # noqa: SLF001 - argparse shows them nowhere else
        if action.help is argparse.SUPPRESS:
            continue
        for flag in action.option_strings:
            if flag.startswith("--") and "_" not in flag:
                yield flag, (action.help or "").partition(". ")[0].partition(" (default")[0]


def jobs(incomplete: str) -> list[str]:
    """Return the names of job directories that begin with a word, the latest first."""
    found: list[str] = []
    for state in config.state_dirs(config.environ()):
        with contextlib.suppress(OSError):
            found += os.listdir(state / "jobs")
    return sorted((name for name in found if name.startswith(incomplete)), reverse=True)
