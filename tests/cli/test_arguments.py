"""The command line of ``dlrover-run``, compared with torchrun's own wherever torchrun has an answer."""

from __future__ import annotations

import argparse
import os
import string
import subprocess
import sys
import uuid
import venv

import pytest
from hypothesis import given, settings, strategies as st

import dlrover
from dlrover._util.accelerators import RESOURCES
from dlrover.cli.arguments import build_parser, parse
from dlrover.cli.launchspec import (
    Endpoint,
    parse_endpoint,
    parse_local_ranks,
    parse_nnodes,
    parse_rdzv_conf,
    parse_signals,
    parse_std,
)
from dlrover.cli.nproc import probe_devices, resolve_nproc
from dlrover.errors import ConfigurationError, ExitCode
from dlrover.spec.launch import Entry, Std, StdMap

TORCHRUN_DESTS = [
    "nnodes",
    "nproc_per_node",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "standalone",
    "max_restarts",
    "monitor_interval",
    "start_method",
    "event_log_handler",
    "role",
    "module",
    "no_python",
    "run_path",
    "log_dir",
    "redirects",
    "tee",
    "local_ranks_filter",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "node_rank",
    "master_addr",
    "master_port",
    "local_addr",
    "logs_specs",
    "numa_binding",
    "signals_to_handle",
    "shutdown_timeout",
    "virtual_local_rank",
    "training_script",
    "training_script_args",
]

OWN_DESTS = [
    "network_check",
    "node_unit",
    "auto_config",
    "auto_tunning",
    "exclude_straggler",
    "save_at_breakpoint",
    "accelerator",
    "precheck",
    "job_dir",
    "local_nodes",
    "servers",
    "node_memory",
    "node_cpu",
    "auto_scale",
    "config",
    "output",
]

PATH_ONLY = {"PATH": os.environ.get("PATH", os.defpath)}


@pytest.fixture(autouse=True)
def _script(tmp_path, monkeypatch):
    """A directory with a training script, and no option set by the environment."""
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


@pytest.fixture(scope="module")
def torchrun():
    run = pytest.importorskip("torch.distributed.run")
    if "shutdown_timeout" not in actions(run.get_args_parser()):
        pytest.skip("this torchrun is older than 2.13 and has fewer options")
    return run


def no_probe(word):
    raise AssertionError(f"asked for {word}")


def options(*argv, probe=no_probe, **environ):
    """The meaning of a command line that runs ``train.py``."""
    return parse([*argv, "train.py"], {**PATH_ONLY, **environ}, probe)


def refusal(*argv, probe=no_probe, **environ):
    """The one sentence that refuses a whole command line."""
    with pytest.raises(ConfigurationError) as caught:
        parse(argv, {**PATH_ONLY, **environ}, probe)
    message = str(caught.value)
    assert caught.value.exit_code is ExitCode.USAGE
    assert "\n" not in message
    assert message.endswith((".", "; see dlrover-run --help"))
    return message


def outcome(function, *args):
    """What a function returns, or None where it refuses."""
    try:
        return function(*args)
    except (ValueError, ConfigurationError):
        return None


def actions(parser):
    return {action.dest: action for action in parser._actions}


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
        "accelerator": "nvidia.com/gpu",
        "precheck": 0,
        "job_dir": "",
        "local_nodes": 0,
        "servers": "",
        "node_memory": "",
        "node_cpu": "",
        "auto_scale": False,
        "config": "",
        "output": "text",
    }


@pytest.mark.parametrize("accelerator", RESOURCES)
def test_accelerators(accelerator):
    assert options("--accelerator", accelerator).accelerator == accelerator


# Whole command lines

COMMAND_LINES = [
    "train.py",
    "--standalone train.py",
    "--standalone --nproc-per-node=gpu train.py --lr 0.1",
    "--standalone --nproc_per_node auto train.py",
    "--nnodes 2 --nproc-per-node 8 --node-rank 1 --master-addr h0 --master-port 29501 train.py",
    "--nnodes=2 --nproc_per_node=8 --node_rank=0 --master_addr=h0 --master_port=29501 train.py",
    "--nnodes 1:4 --max-restarts 3 --rdzv-id job --rdzv-backend c10d --rdzv-endpoint h0 train.py",
    "--nnodes=1:4 --max_restarts=3 --rdzv_id=job --rdzv_backend=c10d --rdzv_endpoint=h0:1 train.py",
    "--rdzv-conf join_timeout=600,last_call_timeout=5 train.py",
    "-m pkg.train --epochs 3",
    "--module pkg.train -m",
    "--no-python bash -c true",
    "--no_python ./run.sh --nnodes 3",
    "--run-path /abs/train.py --run-path",
    "-r 3 -t 1 --log-dir logs train.py",
    "-r3 -t0:1,1:2 train.py",
    "--redirects 0:3,1:0 --tee=3 --log_dir=logs train.py",
    "--local-ranks-filter 0,1 --duplicate-stdout-filters a,b,,c train.py",
    "--duplicate_stderr_filters x --local_ranks_filter=2 train.py",
    "--monitor-interval 5 --start-method forkserver --event-log-handler console train.py",
    "--role trainer --numa-binding node --virtual-local-rank --logs-specs default train.py",
    "--signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 5 --local-addr 10.0.0.1 train.py",
    "--nnodes 2 --nnodes 3 train.py",
    "train.py --nnodes 9 -m --unknown -- x",
    "--nnodes 2 -- train.py -- x",
    "--nn 1 --nproc_p 4 --stand --max-r 1 train.py",
    "train.py -",
]


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

    assert (made.launch.max_restarts, made.standalone, made.max_nodes) == (3, True, 1)


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


# Nodes


def test_the_plain_command_line():
    made = options()

    assert (made.min_nodes, made.max_nodes, made.node_unit, made.local_nodes) == (1, 1, 1, 0)
    assert (made.launch.entry, made.launch.target) == (Entry.SCRIPT, "train.py")
    assert made.standalone
    assert (made.node_rank, made.node_rank_given) == (0, False)
    assert (made.local_addr, made.master_port, made.job_dir, made.config_file) == ("", 0, "", "")
    assert (made.output, made.omp_num_threads, made.notices) == ("text", "", ())
    assert made.launch.args == made.launch.local_ranks_filter == ()
    assert made.launch.shutdown_timeout == 30.0


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_nnodes(least, more):
    assert parse_nnodes(f"{least}:{least + more}") == (least, least + more)
    assert parse_nnodes(str(least)) == (least, least)


@given(st.text(string.digits + ":-+_. xe", max_size=6))
def test_nnodes_that_is_taken_is_a_range(text):
    bounds = outcome(parse_nnodes, text)

    assert bounds is None or 1 <= bounds[0] <= bounds[1]


@pytest.mark.parametrize(
    ("argv", "bounds"),
    [
        ("--local-nodes 3", (3, 3, 3)),
        ("--local-nodes 3 --nnodes 3", (3, 3, 3)),
        ("--local-nodes 3 --nnodes 1:4", (1, 4, 3)),
        ("--nnodes 2:4", (2, 4, 0)),
        ("--nnodes 4 --node-unit 2", (4, 4, 0)),
        ("--nnodes 1:5 --node-unit 2", (1, 5, 0)),
        ("--local-nodes 3 --nnodes 1:4 --node-unit 2", (1, 4, 3)),
    ],
)
def test_numbers_of_nodes(argv, bounds):
    made = options(*argv.split())

    assert (made.min_nodes, made.max_nodes, made.local_nodes) == bounds


def test_local_nodes_yield_to_a_number_of_nodes_from_the_environment():
    made = options("--local-nodes", "2", PET_NNODES="1:4")

    assert (made.min_nodes, made.max_nodes) == (1, 4)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--nnodes 4:2", "--nnodes 4:2: the minimum, 4, is greater than the maximum, 2."),
        ("--nnodes 0", "--nnodes 0: a job needs at least 1 node."),
        ("--nnodes 0:2", "--nnodes 0:2: a job needs at least 1 node."),
        ("--nnodes two", "--nnodes two: must be a whole number N, or two as MIN:MAX."),
        ("--nnodes 1:2:3", "--nnodes 1:2:3: must be a whole number N, or two as MIN:MAX."),
        ("--local-nodes -1", "--local-nodes -1: must be a whole number, 1 or more."),
        ("--local-nodes 5 --nnodes 2:4", "--local-nodes 5: --nnodes 2:4 asks for 2 to 4 nodes."),
        ("--local-nodes 1 --nnodes 2:4", "--local-nodes 1: --nnodes 2:4 asks for 2 to 4 nodes."),
        ("--node-unit 0", "--node-unit 0: must be a whole number, 1 or more."),
        (
            "--nnodes 3 --node-unit 2",
            "--node-unit 2: 3 nodes (--nnodes 3) include no multiple of 2.",
        ),
        (
            "--nnodes 2:3 --node-unit 4",
            "--node-unit 4: 2 to 3 nodes (--nnodes 2:3) include no multiple of 4.",
        ),
        (
            "--local-nodes 3 --node-unit 2",
            "--node-unit 2: 3 nodes (--local-nodes 3) include no multiple of 2.",
        ),
        (
            "--local-nodes 2 --nnodes 1:4 --node-unit 4",
            "--node-unit 4: 1 to 2 nodes (--nnodes 1:4 with --local-nodes 2) include no multiple "
            "of 4.",
        ),
        ("--node-rank -1", "--node-rank -1: must be 0 or a positive whole number."),
        (
            "--nnodes 2 --node-rank 2",
            "--node-rank 2: must be less than the number of nodes, 2.",
        ),
        ("--max-restarts -1", "--max-restarts -1: must be 0 or a positive whole number."),
        (
            "--standalone --nnodes 2",
            "--standalone: trains on this machine alone, but --nnodes 2 waits for other nodes; "
            "--local-nodes 2 runs them here.",
        ),
    ],
)
def test_refused_numbers(argv, message):
    assert refusal(*argv.split(), "train.py") == message


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(0, 12), st.integers(1, 12))
def test_a_node_unit_is_refused_when_no_world_is_possible(least, more, unit):
    most = least + more
    possible = any(nodes % unit == 0 for nodes in range(least, most + 1))
    argv = [f"--nnodes={least}:{most}", f"--node-unit={unit}", "--no-python", sys.executable]

    assert (outcome(parse, argv, {}, no_probe) is not None) == possible


# Rendezvous


@pytest.mark.parametrize(
    "argv",
    [
        "--standalone",
        "--nnodes 1",
        "--nnodes 1 --rdzv-id mine",
        "--standalone --rdzv-backend etcd --rdzv-endpoint h:1 --rdzv-id mine",
        "--standalone --nnodes 1:4",
        "--standalone --local-nodes 2",
        "--local-nodes 1",
    ],
)
def test_standalone(argv):
    first, second = options(*argv.split()), options(*argv.split())

    assert first.standalone
    assert (first.rdzv_backend, first.rdzv_endpoint) == ("c10d", None)
    assert uuid.UUID(first.launch.run_id).version == 4
    assert first.launch.run_id != second.launch.run_id


@pytest.mark.parametrize(
    ("argv", "backend", "endpoint"),
    [
        ("--nnodes 2", "static", ("127.0.0.1", 29500)),
        ("--master-port 1234", "static", ("127.0.0.1", 1234)),
        ("--master-port 0", "static", ("127.0.0.1", 0)),
        ("--nnodes 2 --master-addr h0 --master-port 1234", "static", ("h0", 1234)),
        ("--nnodes 2 --master-addr [::1]", "static", ("::1", 29500)),
        ("--rdzv-endpoint h0:1234", "static", ("h0", 1234)),
        ("--rdzv-endpoint h0 --master-port 1234", "static", ("h0", 1234)),
        ("--rdzv-backend c10d --rdzv-endpoint h0", "c10d", ("h0", 29400)),
        ("--rdzv-backend c10d --rdzv-endpoint h0:1", "c10d", ("h0", 1)),
        ("--rdzv-backend c10d", "c10d", None),
        (
            "--nnodes 1:4 --rdzv-backend etcd-v2 --rdzv-endpoint [::1]:2379",
            "etcd-v2",
            ("::1", 2379),
        ),
    ],
)
def test_rendezvous(argv, backend, endpoint):
    made = options(*argv.split(), "--rdzv-id=mine")

    assert not made.standalone
    assert (made.rdzv_backend, made.rdzv_endpoint) == (backend, endpoint)
    assert made.launch.run_id == "mine"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--nnodes 2 --master-port 65536", "--master-port 65536: must be a port, 0 to 65535."),
        ("--standalone --master-port -1", "--master-port -1: must be a port, 0 to 65535."),
        (
            "--rdzv-endpoint h0:99999",
            "--rdzv-endpoint h0:99999: the port must be a number from 0 to 65535.",
        ),
        (
            "--rdzv-backend c10d --rdzv-endpoint http://h0:1",
            "--rdzv-endpoint http://h0:1: must be HOST:PORT, where the host is a name or an IP "
            "address.",
        ),
        (
            "--nnodes 2 --master-addr a/b",
            "--master-addr a/b:29500: must be HOST:PORT, where the host is a name or an IP address.",
        ),
        ("--rdzv-conf a", "--rdzv-conf a: 'a' is not of the form KEY=VALUE."),
        ("--rdzv-conf a=1,", "--rdzv-conf a=1,: '' is not of the form KEY=VALUE."),
        ("--rdzv-conf =1", "--rdzv-conf =1: '=1' is not of the form KEY=VALUE."),
    ],
)
def test_refused_rendezvous(argv, message):
    assert refusal(*argv.split(), "train.py") == message


@pytest.mark.torch
@settings(deadline=None)
@given(text=st.text("ab.-_:[]09 ,/", min_size=1, max_size=12).filter(str.strip))
def test_endpoints_are_torchs(torchrun, text):
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    assert outcome(parse_endpoint, "--rdzv-endpoint", text, 29400) == outcome(
        parse_rendezvous_endpoint, text, 29400
    )


@pytest.mark.torch
@settings(deadline=None)
@given(text=st.text("ab=, 1", max_size=12))
def test_rendezvous_settings_are_torchs(torchrun, text):
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    assert outcome(parse_rdzv_conf, text) == outcome(_parse_rendezvous_config, text)


def test_rendezvous_settings():
    assert options("--rdzv-conf", " a=1, b = x=y ").rdzv_conf == {"a": "1", "b": "x=y"}
    assert parse_endpoint("--x", "fe80::1:29500", 1) == Endpoint("fe80::1", 29500)


@pytest.mark.parametrize(
    ("argv", "environ", "rank"),
    [
        (["--node-rank", "0"], {}, (0, True)),
        (["--node-rank", "1", "--nnodes", "2"], {}, (1, True)),
        (["--nnodes", "2"], {"PET_NODE_RANK": "1"}, (1, True)),
        (["--nnodes", "2"], {}, (0, False)),
        (["--rdzv-backend", "c10d", "--node-rank", "7"], {}, (7, True)),
        (["--node-rank", "7"], {}, (7, True)),
    ],
)
def test_node_rank(argv, environ, rank):
    made = options(*argv, **environ)

    assert (made.node_rank, made.node_rank_given) == rank


# Logs, signals, shutdown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", StdMap()),
        ("3", StdMap(default=3)),
        ("0:1,1:2", StdMap(by_rank={0: 1, 1: 2})),
        ("10:3", StdMap(by_rank={10: 3})),
    ],
)
def test_streams(text, expected):
    made = options("--redirects", text, "--tee", text).launch

    assert made.redirects == made.tee == expected


@pytest.mark.torch
@settings(deadline=None)
@given(text=st.text("0123457:,-", max_size=9))
def test_streams_are_torchs(torchrun, text):
    from torch.distributed.elastic.multiprocessing import Std as TorchStd
    from torch.distributed.elastic.multiprocessing.api import to_map

    theirs = outcome(TorchStd.from_str, text)
    ours = outcome(parse_std, "--tee", text)
    if theirs is None:  # we also take local ranks of two digits, which torchrun does not
        assert ours is None or max(ours.by_rank, default=0) > 9 or text[0] == "0" or ",0" in text
    else:
        assert {rank: int(std) for rank, std in to_map(theirs, 10).items()} == {
            rank: int(ours.of(rank)) for rank in range(10)
        }


def test_streams_of_a_rank_that_is_not_named():
    assert options("--tee", "0:3").launch.tee.of(1) is Std.NONE


@pytest.mark.parametrize(
    ("argv", "start"),
    [
        (
            "--redirects 4",
            "--redirects 4: must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or",
        ),
        ("-t 0:4", "--tee 0:4: must be 0 (none)"),
        ("-r 0:1,", "--redirects 0:1,: must be 0 (none)"),
        ("--local-ranks-filter 0,x", "--local-ranks-filter 0,x: must be local ranks with commas"),
        ("--local-ranks-filter 0,,1", "--local-ranks-filter 0,,1: must be local ranks"),
        ("--local-ranks-filter=-1", "--local-ranks-filter -1: must be local ranks"),
        (
            "--signals-to-handle TERM",
            "--signals-to-handle TERM: 'TERM' is not the name of a signal",
        ),
        ("--signals-to-handle SIG_DFL", "--signals-to-handle SIG_DFL: 'SIG_DFL' is not the name"),
        ("--signals-to-handle SIGTERM,", "--signals-to-handle SIGTERM,: '' is not the name"),
        ("--signals-to-handle SIGKILL", "--signals-to-handle SIGKILL: no process can handle"),
        ("--shutdown-timeout -1", "--shutdown-timeout -1: must be a whole number of seconds, 0 or"),
    ],
)
def test_refused_values(argv, start):
    assert refusal(*argv.split(), "train.py").startswith(start)


def test_local_ranks_and_signals():
    assert parse_local_ranks("2, 0,2") == (0, 2)
    assert parse_signals("SIGTERM, SIGUSR1") == "SIGTERM,SIGUSR1"


@pytest.mark.parametrize(
    ("argv", "environ", "seconds"),
    [
        ([], {}, 30.0),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, 5.0),
        (["--shutdown-timeout", "0"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, 0.0),
        (["--shutdown-timeout", "7"], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "x"}, 7.0),
    ],
)
def test_shutdown_timeout(argv, environ, seconds):
    assert options(*argv, **environ).launch.shutdown_timeout == seconds


@pytest.mark.parametrize("text", ["x", "", "-1", "1.5"])
def test_refused_shutdown_timeout_of_the_environment(text):
    message = refusal("train.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT=text)

    assert message.startswith(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text}: must be a whole number")


@pytest.mark.torch
@pytest.mark.parametrize("line", [line for line in COMMAND_LINES if "=gpu" not in line])
def test_launch_is_what_torchrun_would_launch(torchrun, monkeypatch, tmp_path, line):
    for name in ("OMP_NUM_THREADS", "PYTHON_EXEC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] ")
    (tmp_path / "run.sh").touch(mode=0o755)
    argv = line.replace("/abs", str(tmp_path)).split()

    ours = parse(argv, dict(os.environ), torchrun.determine_local_world_size)
    config, command, args = torchrun.config_from_args(torchrun.parse_args(argv))

    launch = ours.launch
    for name in (
        "nproc_per_node",
        "role",
        "max_restarts",
        "signals_to_handle",
        "shutdown_timeout",
        "virtual_local_rank",
        "log_line_prefix_template",
    ):
        assert getattr(launch, name) == getattr(config, name), name
    assert (ours.min_nodes, ours.max_nodes) == (config.min_nodes, config.max_nodes)
    assert (ours.local_addr or None) == config.local_addr
    assert list(launch.duplicate_stdout_filters) == config.duplicate_stdout_filters
    assert list(launch.duplicate_stderr_filters) == config.duplicate_stderr_filters
    assert set(launch.local_ranks_filter) == (config.logs_specs._local_ranks_filter or set())
    binding = config.numa_options.affinity_mode.value if config.numa_options else ""
    assert launch.numa_binding == binding
    assert ours.omp_num_threads == os.environ.get("OMP_NUM_THREADS", "")
    if not ours.standalone:
        assert launch.run_id == config.run_id
    assert command_of(launch) == (command, *args)


def command_of(launch):
    """The command, as torchrun gives it to its agent."""
    start = {
        Entry.SCRIPT: (sys.executable, "-u"),
        Entry.MODULE: (sys.executable, "-u", "-m"),
        Entry.COMMAND: (),
    }.get(launch.entry)
    if launch.entry is Entry.RUN_PATH:
        from torch.distributed.run import run_script_path

        start = (run_script_path,)
    return (*start, launch.target, *launch.args)


# The training program


@pytest.mark.parametrize(
    ("argv", "entry", "target", "args"),
    [
        ("train.py --lr 1", Entry.SCRIPT, "train.py", ("--lr", "1")),
        ("-m pkg.mod -m", Entry.MODULE, "pkg.mod", ("-m",)),
        ("--no-python sh -c true", Entry.COMMAND, "sh", ("-c", "true")),
        ("--run-path --no-python -m train.py", Entry.RUN_PATH, "train.py", ()),
    ],
)
def test_entries(argv, entry, target, args):
    launch = parse(argv.split(), PATH_ONLY, no_probe).launch

    assert (launch.entry, launch.target, launch.args) == (entry, target, args)


def test_a_directory_with_main_and_an_absolute_path_are_scripts(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").touch()

    for target in ("app", str(tmp_path / "train.py")):
        assert parse([target], PATH_ONLY).launch.target == target


def test_refused_programs(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "plain.sh").touch(mode=0o644)

    assert refusal("x.py") == f"training script x.py does not exist (looked in {tmp_path})."
    assert refusal("--run-path", "x.py").startswith("training script x.py does not exist")
    assert refusal("empty") == "training script empty is a directory without __main__.py."
    assert refusal("--no-python", "no-such-command-here") == (
        "command no-such-command-here is neither an executable file nor found on PATH."
    )
    assert refusal("--no-python", "./plain.sh").startswith("command ./plain.sh is neither")
    assert refusal("--no-python", "-m", "x") == (
        "--no-python: cannot be combined with -m or --module."
    )


def test_interpreter_and_prefix_come_from_torchruns_variables():
    launch = options(
        PYTHON_EXEC="/opt/py", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="${rank}: "
    ).launch

    assert (launch.python, launch.log_line_prefix_template) == ("/opt/py", "${rank}: ")


# The node check


@pytest.mark.parametrize(
    ("argv", "checked", "excluded"),
    [
        ("", False, False),
        ("--network-check", True, False),
        ("--precheck 1", True, False),
        ("--exclude-straggler", True, True),
        ("--network_check --exclude_straggler", True, True),
    ],
)
def test_node_check(argv, checked, excluded):
    parsed = options(*argv.split())
    assert (parsed.node_check, parsed.exclude_stragglers) == (checked, excluded)


# Notices


@pytest.mark.parametrize(
    ("argv", "notices"),
    [
        ("--logs-specs default --start-method spawn --event-log-handler null --precheck 0", []),
        ("--network-check --exclude-straggler --precheck 2", []),
        ("--auto-tunning", []),
        (
            "--logs-specs mine --event-log-handler console --start-method fork",
            [
                "--logs-specs mine has no effect: the agent writes the workers' logs itself, "
                "without torch's classes.",
                "--event-log-handler console has no effect: the job's journal records its events.",
                "--start-method fork has no effect: each worker is a program of its own, not a "
                "fork of the launcher.",
            ],
        ),
    ],
)
def test_notices(argv, notices):
    assert list(options(*argv.split()).notices) == notices


# Workers per node


@pytest.mark.parametrize(
    ("text", "environ", "threads"),
    [("1", {}, ""), ("2", {}, "1"), ("2", {"OMP_NUM_THREADS": "8"}, ""), ("auto", {}, "1")],
)
def test_threads(text, environ, threads):
    made = options("--nproc-per-node", text, probe=lambda _: 4, **environ)

    assert made.omp_num_threads == threads


def test_a_number_of_workers_asks_nobody():
    assert resolve_nproc("8", no_probe) == 8
    assert resolve_nproc("npu", {"npu": 16}.__getitem__) == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "--nproc-per-node 0: a node needs at least 1 worker."),
        ("-2", "--nproc-per-node -2: a node needs at least 1 worker."),
        ("1.5", "--nproc-per-node 1.5: neither a whole number nor one of auto, gpu, cpu and xpu."),
        ("", "--nproc-per-node : neither a whole number nor one of auto, gpu, cpu and xpu."),
    ],
)
def test_refused_numbers_of_workers(text, message):
    assert refusal(f"--nproc-per-node={text}", "train.py") == message


def test_devices_are_counted_after_everything_else_is_known_to_be_right():
    assert "--tee 9" in refusal("--nproc-per-node", "gpu", "--tee", "9", "train.py")


FAKE_TORCH = """
import types

class device:
    def __init__(self, name):
        self.type = "npu" if name == "privateuseone" else name

def _devices(count):
    return types.SimpleNamespace(is_available=lambda: count > 0, device_count=lambda: count)

accelerator, cuda, xpu, npu = (_devices(count) for count in COUNTS)
get_device_module = {"npu": npu}.__getitem__
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "counts", "expected"),
    [
        ("auto", (4, 3, 2, 1), 4),
        ("gpu", (4, 3, 2, 1), 3),
        ("xpu", (4, 3, 2, 1), 2),
        ("npu", (4, 3, 2, 1), 1),
        ("auto", (0, 0, 0, 0), len(os.sched_getaffinity(0))),
        ("gpu", (1, 0, 1, 1), "finds no such device."),
        ("npu", (1, 1, 1, 0), "finds no such device."),
        ("cuda", (1, 1, 1, 1), "torch knows no such kind of device; auto, gpu, cpu, xpu or a num"),
    ],
)
def test_devices_that_torch_reports(tmp_path, word, counts, expected):
    package = tmp_path / "site"
    package.mkdir()
    (package / "torch.py").write_text(FAKE_TORCH.replace("COUNTS", repr(counts)))
    (tmp_path / "torch.py").write_text(
        "raise RuntimeError('not torch')"
    )  # in the current directory
    environ = {"PYTHONPATH": str(package)}

    if isinstance(expected, int):
        assert probe_devices(word, sys.executable, environ) == expected
    else:
        with pytest.raises(ConfigurationError, match=expected) as caught:
            probe_devices(word, sys.executable, environ)
        assert str(caught.value).startswith(f"--nproc-per-node {word}: ")


@pytest.mark.slow
def test_an_interpreter_without_torch(tmp_path):
    venv.create(tmp_path / "bare", symlinks=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    processors = len(os.sched_getaffinity(0))

    made = parse(["--nproc-per-node=auto", "train.py"], {**PATH_ONLY, "PYTHON_EXEC": python})

    assert made.launch.nproc_per_node == processors
    message = refusal("--nproc-per-node=gpu", "train.py", probe=None, PYTHON_EXEC=python)
    assert message == (
        f"--nproc-per-node gpu: torch, which counts these devices, is not installed for {python}."
    )


@pytest.mark.slow
def test_an_interpreter_that_does_not_answer(tmp_path):
    def program(name, text):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    for python, message in (
        (program("hangs", "exec sleep 60"), "did not count the devices within 0.1 s; give the num"),
        (program("fails", "echo first >&2; echo 'no libcuda' >&2; exit 1"), r"\(no libcuda\)\.$"),
        (program("chats", "echo hello"), "answered 'hello' instead of a number of devices"),
        (program("silent", "exit 0"), "answered 'no output' instead"),
        (str(tmp_path / "absent"), r"cannot start .*absent to count the devices \(No such file"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            probe_devices("gpu", python, PATH_ONLY, timeout=0.1 if "hangs" in python else 20.0)


def test_processors_are_counted_without_an_interpreter():
    assert probe_devices("cpu", "/no/such/python") == len(os.sched_getaffinity(0))


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("word", ["auto", "cpu", "gpu", "privateuseone"])
def test_words_count_what_torchrun_counts(torchrun, word):
    try:
        expected = torchrun.determine_local_world_size(word)
    except (ValueError, RuntimeError, AttributeError):
        with pytest.raises(ConfigurationError):
            probe_devices(word, sys.executable)
    else:
        assert probe_devices(word, sys.executable) == expected


@pytest.mark.slow
def test_parsing_imports_no_framework():
    program = (
        "import sys; from dlrover.cli.arguments import parse;"
        "parse(['--no-python', sys.executable], {});"
        "assert not {'torch', 'grpc', 'numpy'} & set(sys.modules)"
    )
    environ = {"PYTHONPATH": os.pathsep.join(sys.path)}

    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=20)


def test_the_parser_is_argparses():
    assert isinstance(build_parser({}), argparse.ArgumentParser)
