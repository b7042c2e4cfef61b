"""What cannot work is said in one sentence, with the right exit code, in a bounded time."""

import os
import shutil
import socket

import pytest

from dlrover.errors import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

USAGE = {
    "unknown option": (["--nope", "SCRIPT"], "unknown option --nope"),
    "least above most": (["--nnodes", "4:2", "SCRIPT"], "--nnodes 4:2: the minimum, 4, is greater"),
    "no program": ([], "training_script"),
    "missing script": (["not/there.py"], "training script not/there.py does not exist"),
    "missing command": (["--no-python", "no-such-command"], "command no-such-command is neither"),
    "wrong setting": (["--rdzv-conf", "patience=1", "SCRIPT"], "--rdzv-conf sets patience"),
    "wrong value": (["--rdzv-conf", "join_timeout=soon", "SCRIPT"], "join_timeout"),
    "configuration": (["--config", "not/there.toml", "SCRIPT"], "not/there.toml cannot be read"),
    "wrong log directory": (["--log-dir=/dev/null/x", "SCRIPT"], "--log-dir /dev/null/x cannot be"),
    "no text": (["--no-python", "true", os.fsdecode(b"caf\xe9")], "'caf\\udce9' is not UTF-8"),
    "no place to meet": (
        ["--nnodes", "2", "--rdzv-backend", "c10d", "SCRIPT"],
        "give --rdzv-endpoint HOST:PORT",
    ),
    "no token": (
        ["--nnodes", "2", "--rdzv-endpoint", "host0:29400", "SCRIPT"],
        "DLROVER_TOKEN is not set: nodes that meet at host0 need a secret in common.",
    ),
}


def sentences(stderr: str) -> list[str]:
    """The lines of a short message, after checking that it is one for people."""
    assert "Traceback" not in stderr
    return stderr.splitlines()


def test_a_missing_interpreter_is_named(run) -> None:
    launch = run(run.scripts / "hello.py", env={"PYTHON_EXEC": "/no/such/python"})
    (sentence,) = sentences(launch.end_with(ExitCode.USAGE)[1])
    assert "PYTHON_EXEC=/no/such/python" in sentence


def test_a_node_of_a_master_that_is_elsewhere_needs_its_token(run) -> None:
    launch = run(run.scripts / "hello.py", env={"DLROVER_MASTER_ADDR": "localhost:1"})
    (sentence,) = sentences(launch.end_with(ExitCode.USAGE)[1])
    assert "DLROVER_TOKEN is not set: it must be the token of the master at localhost:1" in sentence


def test_an_interpreter_that_starts_nothing_is_named(run) -> None:
    launch = run(run.scripts / "hello.py", env={"PYTHON_EXEC": shutil.which("false")})
    _, stderr = launch.end_with(ExitCode.USER_CODE, timeout=20)
    expected = "false left with exit code 1 before it ran the program"
    assert any(expected in line for line in sentences(stderr))


def test_too_few_devices_for_the_workers_are_named_at_once(run) -> None:
    options = ["--virtual-local-rank", "--nproc-per-node=2"]
    launch = run(*options, run.scripts / "hello.py", env={"CUDA_VISIBLE_DEVICES": "0"})
    stdout, stderr = launch.end_with(ExitCode.USER_CODE, timeout=20)
    assert any("local rank 1 has no device" in line for line in sentences(stderr))
    assert not stdout


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_is_one_sentence_and_exit_code_2(run, case: str) -> None:
    args, expected = USAGE[case]
    script = str(run.scripts / "hello.py")
    launch = run(*[script if arg == "SCRIPT" else arg for arg in args])
    stdout, stderr = launch.end_with(ExitCode.USAGE, timeout=40)
    (sentence,) = sentences(stderr)
    assert sentence.startswith("dlrover-run: ")
    assert expected in sentence
    assert not stdout


def test_an_unknown_host_is_given_up_after_connect_timeout(run) -> None:
    endpoint = ["--rdzv-backend=c10d", "--rdzv-endpoint=no-such-host.invalid:1"]
    conf = "--rdzv-conf=connect_timeout=3"
    env = {"DLROVER_TOKEN": "secret"}
    launch = run("--nnodes=2", *endpoint, conf, run.scripts / "hello.py", env=env)
    _, stderr = launch.end_with(ExitCode.INFRASTRUCTURE, timeout=40)
    waiting, end = sentences(stderr)
    assert "waiting up to 3 s (connect_timeout) for the master's host" in waiting
    assert "The master's host no-such-host.invalid cannot be resolved: " in end
    assert end.endswith("for 3 s (connect_timeout).")


@pytest.mark.parametrize("rank", [0, 1])
def test_node_0_of_the_static_rendezvous_runs_the_master_whatever_its_address(run, rank) -> None:
    """As with torchrun: the address may be that of a service in front of the machine."""
    static = ["--nnodes=2", f"--node-rank={rank}", "--master-addr=192.0.2.1"]
    conf = "--rdzv-conf=connect_timeout=1,join_timeout=2"
    launch = run(*static, conf, run.scripts / "hello.py", env={"DLROVER_TOKEN": "secret"})
    launch.end_with(ExitCode.INFRASTRUCTURE, timeout=40)
    assert (launch.job_dir / "job.json").exists() == (rank == 0)


def test_an_unwritable_job_directory_is_named(run, tmp_path) -> None:
    (tmp_path / "file").touch()
    launch = run("--job-dir", tmp_path / "file", run.scripts / "hello.py")
    (sentence,) = sentences(launch.end_with(ExitCode.USAGE)[1])
    assert f"--job-dir {tmp_path / 'file'} cannot be used" in sentence


def test_a_job_directory_in_use_is_refused_and_the_job_in_it_unharmed(run) -> None:
    first = run(run.scripts / "wait_for_file.py", "go")
    first.wait_for("worker")
    second = run(run.scripts / "hello.py")
    (sentence,) = sentences(second.end_with(ExitCode.USAGE)[1])
    assert f"another dlrover-run uses it (process {first.process.pid} of " in sentence
    (first.job_dir.parent / "go").touch()
    first.succeed()


def test_a_taken_port_for_rank_0_is_named_before_anything_starts(run) -> None:
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        launch = run("--master-port", port, run.scripts / "hello.py")
        (sentence,) = sentences(launch.end_with(ExitCode.USAGE)[1])
    assert sentence.startswith(f"dlrover-run: --master-port {port}: the port is taken by")


def test_a_taken_port_for_the_master_is_named(run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launch = run(*meeting_at(port), "--nnodes=2", run.scripts / "hello.py")
        _, stderr = launch.end_with(ExitCode.INFRASTRUCTURE, timeout=40)
    assert any(f":{port}: the port is taken" in line for line in sentences(stderr))


def test_a_round_without_enough_nodes_ends_when_it_said(run) -> None:
    conf = "--rdzv-conf=join_timeout=2"
    launch = run(*meeting_at(run.free_port()), "--nnodes=2", conf, run.scripts / "hello.py")
    _, stderr = launch.end_with(ExitCode.INFRASTRUCTURE, timeout=40)
    reason = "only 1 of at least 2 nodes joined round 1 within 2 s (join_timeout)."
    assert reason in sentences(stderr)


@pytest.mark.parametrize("listener", ["none", "silent", "deaf"])
def test_an_unreachable_master_is_given_up_after_connect_timeout(run, listener: str) -> None:
    """Nobody listens, somebody who never answers, or somebody who takes no connection at all."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        host, port = held.getsockname()
        fillers = []
        if listener != "none":
            held.listen(0)
        if listener == "deaf":
            fillers = [fill(host, port) for _ in range(4)]
        launch = run(
            "--rdzv-conf=connect_timeout=2",
            run.scripts / "hello.py",
            env={"DLROVER_MASTER_ADDR": f"{host}:{port}", "DLROVER_TOKEN": "secret"},
        )
        _, stderr = launch.end_with(ExitCode.INFRASTRUCTURE, timeout=40)
        for filler in fillers:
            filler.close()
    sentence = f"No DLRover master answered at {host}:{port} within 2 s (connect_timeout)."
    assert sentences(stderr)[0] == sentence


def fill(host: str, port: int) -> socket.socket:
    """Take one place in the queue of a listener, so that it drops further connections."""
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex((host, port))
    return sock


def meeting_at(port: int) -> list[str]:
    return ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=meeting"]
