"""The ``dlrover-run`` commands of pods, and whose options are whose."""

from __future__ import annotations

from typing import Any

import pytest

from dlrover.cli.run.arguments import build_parser
from dlrover.kubernetes.resources import commands


def template(*command: str, sidecar: bool = False) -> dict[str, Any]:
    beside = [{"name": "proxy", "command": ["dlrover-run", "--nnodes=9", "x.py"]}]
    main = {"name": "main", "command": list(command)}
    return {"spec": {"containers": [*(beside if sidecar else []), main]}}


def test_the_options_are_those_of_the_launcher() -> None:
    parser = build_parser({})
    for own, (switches, values) in enumerate(zip(commands.SWITCHES, commands.VALUES, strict=True)):
        actions = [one for one in parser._actions if (one.dest in parser.own_options) == own]
        for wanted, has_value in ((switches, False), (values, True)):
            flags = {
                flag.lstrip("-").replace("_", "-")
                for one in actions
                for flag in one.option_strings
                if flag.startswith("--") and (one.nargs != 0) == has_value
            }
            assert flags == set(wanted.split())
    short = {one: parser._option_string_actions[f"-{one}"].dest for one in commands.SHORT}
    assert short == commands.SHORT


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (
            ["dlrover-run", "--nnodes", "1:2", "--network_check", "train.py", "--nnodes=9"],
            {"nnodes": "1:2", "network-check": ""},
        ),
        (["dlrover-run", "train.py", "--auto-scale", "--chief"], {}),
        (["dlrover-run", "-m", "train", "--max-restarts=9"], {"module": ""}),
        (["dlrover-run", "-r3", "--max-rest=2", "t.py"], {"redirects": "3", "max-restarts": "2"}),
        (["tini", "--", "/opt/bin/dlrover-run", "--node-unit", "2", "t.py"], {"node-unit": "2"}),
        (["python", "-m", "dlrover.trainer.torch.elastic_run", "--nnodes=2", "t"], {"nnodes": "2"}),
        (["python", "train.py", "--nnodes=3"], {}),
        (
            ["bash", "-c", "which dlrover-run; cd /x;dlrover-run --nnodes=2 \\\n --chief t.py --a"],
            {"nnodes": "2", "chief": ""},
        ),
        (
            [
                "bash",
                "-c",
                "# it's\ndlrover-run --version && dlrover-run --log-dir '' --survive t >l",
            ],
            {"log-dir": "", "survive": ""},
        ),
        (["bash", "-c", "dlrover-run 2>log --survive t.py"], {}),
        (["bash", "-c", "echo \"it's\ndlrover-run --nnodes='2' t.py"], {"nnodes": "2"}),
    ],
)
def test_only_what_stands_before_the_program_is_the_launchers(
    command: list[str], found: dict[str, str]
) -> None:
    assert commands.options(template(*command)) == found


def test_only_the_main_container_counts() -> None:
    assert commands.options(template("dlrover-run", "--chief", "t", sidecar=True)) == {"chief": ""}
    assert commands.options(template("sleep", "1", sidecar=True)) == {}
    assert commands.options({}) == {}


def test_the_arguments_of_an_images_own_command_are_the_launchers() -> None:
    container = {"name": "main", "args": ["--nnodes=1:2", "train.py", "--chief"]}
    assert commands.options({"spec": {"containers": [container]}}) == {"nnodes": "1:2"}
