"""The training program on the command line of ``dlrover-run``, and its number of workers on each node."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv

import pytest

from dlrover import accelerators
from dlrover.cli.run.arguments import build_parser, parse
from dlrover.cli.run.nproc import probe_devices, resolve_nproc
from dlrover.config import Settings
from dlrover.errors import ConfigurationError
from dlrover.master.compose import Request, master_config
from dlrover.spec.job import Entry
from tests.cli.arguments.lines import PATH_ONLY, no_probe, options, refusal

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


def test_a_program_that_only_one_process_can_read_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "saved.py").touch()
    (tmp_path / "link.py").symlink_to("saved.py")  # as /dev/stdin is one, here to a file

    for target in ("-", "pipe", "/dev/null"):
        assert refusal(target) == (
            f"training script {target}: a pipe or device gives the program to one process, once, but each worker and each restart "
            "reads it; save it to a file, and give the file's name."
        )
    assert parse(["link.py"], PATH_ONLY).launch.target == "link.py"


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
        ("--comm-perf-test", True, False),
    ],
)
def test_node_check(argv, checked, excluded):
    request = Request(job=options(*argv.split()).job)
    job = master_config(request, Settings(), "", 0).job
    assert (job.node_check, job.exclude_stragglers) == (checked, excluded)


# Notices


@pytest.mark.parametrize(
    ("argv", "notices"),
    [
        ("--logs-specs default --start-method spawn --event-log-handler null --precheck 0", []),
        ("--network-check --exclude-straggler --precheck 2", []),
        ("--auto-tunning", []),
        (
            "--numa-affinity --membind-policy bind --training_port 60000 --ucp_device_type cpu",
            [
                "--numa-affinity has no effect: this machine has no accelerators.",
                "--membind-policy bind has no effect: a worker that --numa-affinity binds allocates its memory near its "
                "processors.",
                "--training-port 60000 has no effect: workers inherit this environment, with the ports that a library "
                "of collectives reads from it.",
                "--ucp-device-type cpu has no effect: checkpoints fit any number of ranks without a conversion.",
            ],
        ),
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
def test_notices(argv, notices, monkeypatch):
    monkeypatch.setattr(accelerators, "pci_addresses", lambda: ())
    assert list(options(*argv.split()).notices) == notices


def test_numa_affinity_binds_workers_on_a_machine_with_accelerators(monkeypatch):
    monkeypatch.setattr(accelerators, "pci_addresses", lambda: ("0000:3b:00.0",))
    made = options("--numa-affinity")
    assert (made.launch.numa_binding, made.notices) == ("node", ())
    assert options("--numa-affinity", "--numa-binding", "socket").launch.numa_binding == "socket"


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
        ("1025", "--nproc-per-node 1025: a node runs at most 1024 workers."),
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
        "import sys; from dlrover.cli.run.arguments import parse;"
        "parse(['--no-python', sys.executable], {});"
        "assert not {'torch', 'grpc', 'numpy'} & set(sys.modules)"
    )
    environ = {"PYTHONPATH": os.pathsep.join(sys.path)}

    subprocess.run([sys.executable, "-c", program], env=environ, check=True, timeout=20)


def test_the_parser_is_argparses():
    assert isinstance(build_parser({}), argparse.ArgumentParser)
