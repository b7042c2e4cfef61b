"""What the options of ``dlrover-run`` mean: nodes, rendezvous, logs, signals; compared with what torchrun makes of them."""

from __future__ import annotations

import os
import string
import sys
import uuid

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.cli.run.arguments import parse
from dlrover.cli.run.launchspec import (
    Endpoint,
    parse_endpoint,
    parse_local_ranks,
    parse_rdzv_conf,
    parse_signals,
    parse_std,
)
from dlrover.cli.run.nodes import parse_nnodes
from dlrover.spec.job import Entry, Std, StdMap
from tests.cli.arguments.lines import COMMAND_LINES, no_probe, options, outcome, refusal

# Nodes


def test_the_plain_command_line():
    made = options()

    assert (made.job.min_nodes, made.job.max_nodes, made.job.node_unit, made.local_nodes) == (
        1,
        1,
        1,
        0,
    )
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

    assert (made.job.min_nodes, made.job.max_nodes, made.local_nodes) == bounds


def test_a_node_of_a_job_elsewhere_need_not_know_the_number_of_nodes():
    there = {"DLROVER_MASTER_ADDR": "master:1"}
    assert options("--node-unit", "2", **there).job.node_unit == 2
    refused = "--node-unit 2: 3 nodes (--nnodes 3) include no multiple of 2."
    assert refusal("--node-unit", "2", "--nnodes", "3", "train.py", **there) == refused


def test_local_nodes_yield_to_a_number_of_nodes_from_the_environment():
    made = options("--local-nodes", "2", PET_NNODES="1:4")

    assert (made.job.min_nodes, made.job.max_nodes) == (1, 4)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--nnodes 4:2", "--nnodes 4:2: the minimum, 4, is greater than the maximum, 2."),
        ("--nnodes 0", "--nnodes 0: a job needs at least 1 node."),
        ("--nnodes 0:2", "--nnodes 0:2: a job needs at least 1 node."),
        ("--nnodes two", "--nnodes two: must be a whole number N, or two as MIN:MAX."),
        ("--nnodes 1:2:3", "--nnodes 1:2:3: must be a whole number N, or two as MIN:MAX."),
        ("--local-nodes -1", "--local-nodes -1: must be a whole number, 1 or more."),
        ("--local-nodes 5 --nnodes 2:4", "--local-nodes 5: --nnodes 2:4 requests 2 to 4 nodes."),
        ("--local-nodes 1 --nnodes 2:4", "--local-nodes 1: --nnodes 2:4 requests 2 to 4 nodes."),
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
    assert options("--rdzv-conf", "'a=1,b=x=y'").rdzv_conf == {"a": "1", "b": "x=y"}
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
    assert (ours.job.min_nodes, ours.job.max_nodes) == (config.min_nodes, config.max_nodes)
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
