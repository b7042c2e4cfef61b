"""The parser of ``dlrover-run``, compared with torchrun's own wherever torchrun has an answer."""

from __future__ import annotations

import os

import pytest

import dlrover
from dlrover.accelerators import RESOURCES
from dlrover.cli.run.arguments import build_parser, parse
from tests.cli.arguments.lines import (
    COMMAND_LINES,
    OWN_DESTS,
    TORCHRUN_DESTS,
    actions,
    options,
    refusal,
)

# The parser, option by option


@pytest.mark.torch
def test_every_option_of_torchrun_is_known(torchrun):
    torchs = actions(torchrun.get_args_parser())

    assert set(torchs) == {*TORCHRUN_DESTS, "help"}
    assert set(actions(build_parser({}))) == {*TORCHRUN_DESTS, *OWN_DESTS, "help", "version"}


@pytest.mark.torch
@pytest.mark.parametrize("dest", TORCHRUN_DESTS)
def test_option_is_the_same_as_torchruns(torchrun, dest):
    theirs = actions(torchrun.get_args_parser())[dest]
    ours = actions(build_parser({}))[dest]

    assert set(ours.option_strings) == set(theirs.option_strings)
    assert ours.default == theirs.default
    assert ours.const == theirs.const
    assert ours.nargs == theirs.nargs
    assert ours.choices == theirs.choices
    if "filters" in dest:
        for text in ("", "a", "a,b", "a,,b", ",,,", ",a,,,b,", ",,,,c"):
            assert ours.type(text) == theirs.type(text)
    elif dest != "training_script_args":
        assert ours.type is theirs.type
    if dest != "training_script_args":  # may be absent, whatever argparse says of it
        assert ours.required == theirs.required


@pytest.mark.torch
def test_abbreviations_are_allowed_as_in_torchrun(torchrun):
    assert build_parser({}).allow_abbrev == torchrun.get_args_parser().allow_abbrev


@pytest.mark.slow
@pytest.mark.torch
def test_each_abbreviation_that_torchrun_takes_means_the_same(torchrun, capsys):
    theirs, ours = torchrun.get_args_parser(), build_parser({})
    understood = 0
    for action in theirs._actions:
        value = [] if action.nargs == 0 else ["=" + (list(action.choices or "7")[-1])]
        for option in action.option_strings:
            for end in range(3, len(option) + 1):
                if action.dest == "help" or (end == len(option) == 2):
                    continue
                argv = ["".join([option[:end], *value]), "train.py"]
                try:
                    expected = theirs.parse_args(argv)
                except SystemExit:
                    continue  # ambiguous for torchrun
                understood += 1
                assert_same(ours.parse_args(argv), expected)
    assert understood > 200


def assert_same(ours, theirs):
    assert {dest: getattr(ours, dest) for dest in vars(theirs)} == vars(theirs)


@pytest.mark.parametrize("dest", OWN_DESTS)
def test_own_options_have_both_spellings(dest):
    option = "--" + dest.replace("_", "-")
    right = ["--auto-tuning", "--auto_tuning"] if dest == "auto_tunning" else []

    assert actions(build_parser({}))[dest].option_strings == list(
        dict.fromkeys([option, f"--{dest}", *right])
    )


def test_defaults_of_own_options():
    args = build_parser({}).parse_args(["train.py"])

    assert {dest: getattr(args, dest) for dest in OWN_DESTS} == {
        "network_check": False,
        "node_unit": 1,
        "auto_config": False,
        "auto_tunning": False,
        "exclude_straggler": False,
        "save_at_breakpoint": False,
        "survive": False,
        "accelerator": "nvidia.com/gpu",
        "precheck": 0,
        "job_dir": "",
        "dashboard": -1,
        "platform": "",
        "ray_address": "",
        "ray_resources": "",
        "ray_working_dir": "",
        "ray_env": "",
        "local_nodes": 0,
        "servers": "",
        "server_failover": "job",
        "instances": False,
        "spares": "",
        "lifeline_fd": -1,
        "server_module": "",
        "embedding_servers": "",
        "chief": False,
        "evaluators": 0,
        "node_memory": "",
        "node_cpu": "",
        "auto_scale": False,
        "config": "",
        "output": "text",
        "comm_perf_test": False,
        "numa_affinity": False,
        "membind_policy": "none",
        "training_port": None,
        "ucp_device_type": None,
    }


@pytest.mark.parametrize("accelerator", RESOURCES)
def test_accelerators(accelerator):
    assert options("--accelerator", accelerator).accelerator == accelerator


# Whole command lines


@pytest.mark.torch
@pytest.mark.parametrize("line", COMMAND_LINES)
def test_command_line_parses_as_torchrun_parses_it(torchrun, line):
    assert_same(
        build_parser({}).parse_args(line.split()),
        torchrun.get_args_parser().parse_args(line.split()),
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    "line",
    [
        "",
        "--nnodes",
        "--max-restarts x train.py",
        "--master-port=x train.py",
        "--start-method thread train.py",
        "--numa-binding nowhere train.py",
        "--unknown train.py",
        "--standalone=1 train.py",
        "--r 3 train.py",
    ],
)
def test_command_line_that_torchrun_refuses_is_refused(torchrun, line):
    with pytest.raises(SystemExit):
        torchrun.get_args_parser().parse_args(line.split())

    assert refusal(*line.split()).endswith("; see dlrover-run --help")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "the following arguments are required: training_script; see"),
        (
            ["--nprocs", "2", "train.py"],
            "unknown option --nprocs (did you mean --nproc-per-node?); see",
        ),
        (
            ["--network_chek=1", "train.py"],
            "unknown option --network_chek (did you mean --network-c",
        ),
        (["--xyzzy", "train.py"], "unknown option --xyzzy; see"),
        (["-n", "2", "train.py"], "unknown option -n; see"),
        (
            ["--max-restarts", "x", "train.py"],
            "--max-restarts/--max_restarts: invalid int value: 'x'",
        ),
        (["--output", "xml", "train.py"], "--output: invalid choice: 'xml'"),
        (["--precheck", "3", "train.py"], "--precheck: invalid choice: 3"),
        (
            ["--lo", "x", "train.py"],
            "ambiguous option: --lo could match --local-addr, --log-dir, --lo",
        ),
    ],
)
def test_refused_command_lines(argv, text):
    assert text in refusal(*argv)


def test_own_abbreviations_work_where_torchrun_has_none():
    args = build_parser({}).parse_args(["--net", "--job=d", "--node-u", "2", "train.py"])

    assert (args.network_check, args.job_dir, args.node_unit) == (True, "d", 2)


@pytest.mark.parametrize("before", [[], ["-m"], ["--no-python"], ["--role", "trainer"]])
@pytest.mark.parametrize(
    "after", [["--n", "3"], ["--lo=x"], ["--m"], ["--role=r"], ["-m", "--help"]]
)
def test_options_after_the_program_are_the_programs(before, after):
    args = build_parser({}).parse_args([*before, "train", "--", *after])
    bare = build_parser({}).parse_args([*before, "train", *after])

    assert (args.training_script, args.training_script_args) == ("train", after)
    assert vars(bare) == vars(args)
    assert bare.role == ("trainer" if "--role" in before else "default")


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--version"], {})

    assert caught.value.code == 0
    assert capsys.readouterr().out == f"dlrover-run {dlrover.__version__}\n"


def test_help_names_each_option_once_and_survives_a_bad_environment(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(["--help"], {"PET_MAX_RESTARTS": "many"})
    text = capsys.readouterr().out

    assert caught.value.code == 0
    assert "(default: many)" in text
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("  -")]
    assert len(listed) == len(set(listed)) == len(TORCHRUN_DESTS) - 2 + len(OWN_DESTS) + 2
    assert "--nproc_per_node" not in text


# PET_ variables

READS_NO_VARIABLE = ("logs_specs", "numa_binding", "training_script", "training_script_args")


def value_for(action):
    """Some value of an option that is not its default."""
    if action.nargs == 0:
        return "1"
    if action.choices:
        return str(next(choice for choice in action.choices if choice != action.default))
    return "7"


@pytest.mark.torch
@pytest.mark.parametrize("dest", TORCHRUN_DESTS)
def test_variable_sets_the_same_default_as_in_torchrun(torchrun, monkeypatch, dest):
    text = value_for(actions(build_parser({}))[dest])
    monkeypatch.setenv(f"PET_{dest.upper()}", text)

    theirs = torchrun.get_args_parser().parse_args(["train.py"])
    ours = build_parser(os.environ).parse_args(["train.py"])

    assert_same(ours, theirs)
    changed = getattr(ours, dest) != getattr(build_parser({}).parse_args(["train.py"]), dest)
    assert changed == (dest not in READS_NO_VARIABLE)
    assert ours.given == (frozenset([dest]) if changed else frozenset())


@pytest.mark.parametrize("dest", OWN_DESTS)
def test_own_options_read_their_variables(dest):
    action = actions(build_parser({}))[dest]
    text = value_for(action)

    args = build_parser({f"PET_{dest.upper()}": text}).parse_args(["train.py"])

    assert getattr(args, dest) == (True if action.nargs == 0 else action.type(text))
    assert args.given == {dest}


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("MAX_RESTARTS", "x", "--max-restarts, which takes a whole number;"),
        ("MAX_RESTARTS", "", "--max-restarts, which takes a whole number;"),
        ("MONITOR_INTERVAL", "fast", "--monitor-interval, which takes a number;"),
        ("STANDALONE", "yes", "--standalone, which takes 1 (on) or 0 (off);"),
        ("NETWORK_CHECK", "", "--network-check, which takes 1 (on) or 0 (off);"),
        ("PRECHECK", "5", "--precheck, which takes one of 0, 1, 2;"),
        ("START_METHOD", "x", "--start-method, which takes one of spawn, fork, forkserver;"),
        ("OUTPUT", "xml", "--output, which takes one of text, json;"),
    ],
)
def test_bad_variable_is_named(name, text, wanted):
    message = refusal("train.py", **{f"PET_{name}": text})

    assert message.startswith(f"PET_{name}={text!r} is not a value for {wanted}")


def test_command_line_wins_over_a_bad_variable():
    environ = {"PET_MAX_RESTARTS": "x", "PET_STANDALONE": "maybe", "PET_NNODES": "2"}

    made = options("--max-restarts=3", "--standalone", "--nnodes=1", **environ)

    assert (made.launch.max_restarts, made.standalone, made.job.max_nodes) == (3, True, 1)


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ([], {"DLROVER_JOB_DIR": "a"}, "a"),
        ([], {"DLROVER_JOB_DIR": "a", "PET_JOB_DIR": "b"}, "b"),
        (["--job-dir", "c"], {"DLROVER_JOB_DIR": "a", "PET_JOB_DIR": "b"}, "c"),
    ],
)
def test_job_dir_precedence(argv, environ, expected):
    assert options(*argv, **environ).job_dir == expected
