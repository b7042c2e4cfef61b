"""What signals to `dlrover-run` do: to the job, to its workers, and to all that these started."""

import re
import signal
import time
from pathlib import Path

import pytest

from dlrover.errors import ExitCode
from dlrover.spec import events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    directory = tmp_path / "out"
    directory.mkdir()
    return directory


def start(run, script: str, out: Path, *options: str, workers: int = 2, **settings):
    """Start a script of this directory, and wait until its workers are ready."""
    launch = run(*options, run.scripts / script, out, **settings)
    run.until(lambda: len(list(out.glob("ready-*"))) == workers, 20, "ready")
    return launch


def noted(out: Path, name: str) -> list[str]:
    return [path.read_text() for path in sorted(out.glob(f"{name}-*"))]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_workers_may_save_before_they_leave(run, out: Path, number: signal.Signals) -> None:
    launch = start(run, "obedient.py", out, "--nproc-per-node", "2")
    launch.process.send_signal(number)
    _, stderr = launch.end_with(ExitCode.SIGNAL_BASE + number)
    assert noted(out, "signalled") == [number.name] * 2
    assert noted(out, "batch") == ["batch\n"] * 2
    assert noted(out, "saved") == [""] * 2
    assert noted(out, "child-signalled") == []
    assert f"stopped by {number.name}" in stderr
    assert "Traceback" not in stderr


def test_a_signal_reaches_the_workers_of_every_local_node(run, out: Path) -> None:
    launch = start(run, "obedient.py", out, "--local-nodes", "2")
    launch.process.send_signal(signal.SIGTERM)
    launch.end_with(ExitCode.SIGNAL_BASE + signal.SIGTERM)
    assert noted(out, "saved") == [""] * 2


def test_stopping_a_job_gives_its_workers_time_to_save(run, out: Path) -> None:
    launch = start(run, "obedient.py", out, "--nproc-per-node", "2")
    stopped = run.dlrover("stop", "--job-dir", launch.job_dir, "--reason", "Enough.")
    assert stopped.returncode == 0
    _, stderr = launch.end_with(ExitCode.STOPPED)
    assert noted(out, "signalled") == ["SIGTERM"] * 2
    assert noted(out, "saved") == [""] * 2
    assert stderr.startswith("Enough.\n")


def test_a_worker_that_stays_is_killed_after_the_shutdown_timeout(run, out: Path) -> None:
    launch = start(run, "stubborn.py", out, "--nproc-per-node", "2", "--shutdown-timeout", "1")
    began = time.monotonic()
    launch.process.send_signal(signal.SIGTERM)
    launch.end_with(ExitCode.SIGNAL_BASE + signal.SIGTERM)
    assert 1.0 <= time.monotonic() - began < 30.0, "the time without the option"


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_kills_at_once(run, out: Path, second: signal.Signals) -> None:
    launch = start(run, "stubborn.py", out, "--nproc-per-node=2", "--shutdown-timeout=600")
    launch.process.send_signal(signal.SIGINT)
    run.until(lambda: launch.events_of(events.JobEnded), 5, "the job's end")
    launch.process.send_signal(second)
    _, stderr = launch.end_with(ExitCode.SIGNAL_BASE + signal.SIGINT)
    first, rest = stderr.split("\n", 1)
    assert first == (
        "dlrover: SIGINT: the job is being stopped. Its workers have 600 s to end (--shutdown-timeout), "
        "and any checkpoint that is in memory only is stored; after 780 s everything is killed. To kill it now, press Ctrl-C again."
    )
    killed = (
        f"dlrover: {second.name}: everything is killed now.\nThe job was killed after SIGINT.\n"
    )
    assert rest.startswith(killed)
    assert re.search(r"^Ended: +0 steps in (?!0 s)", rest, re.MULTILINE), "it tells how long it ran"


@pytest.mark.parametrize("kind", ["master", "agent", "zygote"])
def test_a_signal_while_the_job_starts_ends_it(run, out: Path, kind: str) -> None:
    launch = run(run.scripts / "obedient.py", out)
    launch.wait_for(kind)
    launch.process.send_signal(signal.SIGINT)
    launch.end_with(ExitCode.SIGNAL_BASE + signal.SIGINT, timeout=40)


def test_workers_may_save_though_the_master_is_away(run, out: Path) -> None:
    """The signal comes at the moment at which the master dies."""
    launch = start(run, "obedient.py", out, workers=1)
    launch.of_kind("master")[0].kill()
    launch.process.send_signal(signal.SIGTERM)
    launch.end_with(ExitCode.SIGNAL_BASE + signal.SIGTERM, timeout=20)
    assert noted(out, "saved") == [""]


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_signal_where_the_nodes_meet_ends_the_job(run, out: Path, nodes: str) -> None:
    """This machine runs both a node and the master; with two nodes it waits for the other."""
    endpoint = f"--rdzv-endpoint=localhost:{run.free_port()}"
    meeting = ["--rdzv-backend=c10d", "--rdzv-id=x", endpoint]
    launch = run(f"--nnodes={nodes}:2", *meeting, "--rdzv-conf=last_call_timeout=0.1",
                 run.scripts / "obedient.py", out)  # fmt: skip
    run.until(lambda: launch.events_of(events.NodeConnected), 10, "the node's connection")
    if nodes == "1":
        run.until(lambda: noted(out, "ready"), 10, "ready")
    launch.process.send_signal(signal.SIGTERM)
    launch.end_with(ExitCode.SIGNAL_BASE + signal.SIGTERM, timeout=40)
    assert noted(out, "saved") == noted(out, "ready")


@pytest.mark.parametrize("kind", ["agent", "zygote"])
def test_a_signal_to_one_of_several_machines_ends_its_node(run, out: Path, kind: str) -> None:
    """The master is elsewhere, and never answers."""
    env = {"DLROVER_MASTER_ADDR": f"127.0.0.1:{run.free_port()}", "DLROVER_TOKEN": "secret"}
    launch = run(run.scripts / "obedient.py", out, env=env)
    launch.wait_for(kind)
    launch.process.send_signal(signal.SIGTERM)
    _, stderr = launch.end_with(ExitCode.SIGNAL_BASE + signal.SIGTERM, timeout=40)
    assert "dlrover: SIGTERM: this node leaves the job. Its workers have 30 s to end" in stderr


@pytest.mark.parametrize("options", [["--nproc-per-node=2"], ["--local-nodes=2"]], ids=str)
def test_the_launchers_death_leaves_nothing_behind(run, out: Path, options: list[str]) -> None:
    launch = start(run, "obedient.py", out, *options)
    launch.process.kill()
    assert launch.wait() == -signal.SIGKILL
    run.until(lambda: not launch.processes(), 5, "the end of all processes")
    assert noted(out, "saved") == [""] * 2


def test_a_job_directory_can_be_used_again_at_once(run, out: Path, tmp_path: Path) -> None:
    launch = start(run, "obedient.py", out, "--nproc-per-node", "2")
    launch.process.kill()
    launch.wait()
    again = run(run.scripts / "hello.py")
    assert again.succeed() == "hello from rank 0 of 1\n"
    assert (launch.job_dir / "run-1" / "events.jsonl").exists()


def test_background_processes_end_before_a_restart(run, tmp_path: Path) -> None:
    """The next round's workers find nothing of the last one's, not even what left their session."""
    script = f"""
        if [ $TORCHELASTIC_RESTART_COUNT = 0 ]; then
            setsid sleep 999 & sleep 999 &
            touch {tmp_path}/ready-$RANK; wait
        fi
        """
    launch = run("--no-python", "--nproc-per-node=2", "bash", "-c", script)
    run.until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, 10, "ready")
    run.until(lambda: len(launch.of_kind("other")) == 4, 10, "four background processes")
    background = {process.pid for process in launch.of_kind("other")}
    launch.of_kind("worker")[0].kill()
    run.until(lambda: len(launch.events_of(events.RoundCompleted)) == 2, 10, "a new round")
    assert not background & launch.pids("other")
    launch.succeed()


SHARES = """
import os, pathlib, signal, sys, time
from multiprocessing import shared_memory

signal.signal(signal.SIGTERM, signal.SIG_IGN)
names, first = pathlib.Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if not first:
    left = [file.read_text() for file in names.glob("True-*") if pathlib.Path("/dev/shm", file.read_text()).exists()]
    assert not left, left
memory = shared_memory.SharedMemory(create=True, size=4096)
(names / f"{first}-{os.environ['RANK']}").write_text(memory.name)
time.sleep(999 if first else 0)
os._exit(0)
"""


def test_shared_memory_of_ended_workers_is_freed(run, tmp_path: Path) -> None:
    """Python's tracker of a worker frees it, whether the worker was killed, would not end, or succeeded."""
    script, names = tmp_path / "shares.py", tmp_path / "names"
    script.write_text(SHARES)
    names.mkdir()
    launch = run("--nproc-per-node=2", "--shutdown-timeout=1", script, names)
    run.until(lambda: [f for f in names.iterdir() if f.read_text()][1:], 20, "shared memory")
    launch.of_kind("worker")[0].kill()
    launch.succeed()
    assert len(list(names.iterdir())) == 4
    assert not [f for f in names.iterdir() if Path("/dev/shm", f.read_text()).exists()]


@pytest.mark.torch
def test_training_resumes_in_the_same_job_directory(train, undisturbed) -> None:
    first = train(30, 0.05, "--nproc-per-node=2")
    first.wait_for_step(12)
    first.launch.process.kill()
    first.launch.wait()
    second = train(30, 0.0, "--nproc-per-node=2")
    second.launch.succeed()
    assert second.losses == undisturbed
    assert [start["from"] for start in second.starts[2:]] == [second.starts[-1]["from"]] * 2
    assert second.starts[-1]["from"] >= 10


def test_background_processes_end_with_a_job_that_succeeded(run) -> None:
    """In the worker's session, in one of their own, and as a daemon."""
    script = "sleep 999 & setsid sleep 999 & (setsid -f sleep 999); echo started"
    launch = run("--no-python", "--nproc-per-node=2", "bash", "-c", script)
    assert launch.succeed() == "started\nstarted\n"


def test_a_stopped_agent_counts_as_lost(run, tmp_path: Path) -> None:
    conf = "--rdzv-conf=heartbeat_interval=0.2,heartbeat_timeout=1.5"
    launch = run("--local-nodes=2", conf, run.scripts / "wait_for_file.py", tmp_path / "go")
    launch.wait_for("worker", 2)
    victim = launch.of_kind("agent")[0]
    victim.suspend()
    lost = run.until(lambda: launch.events_of(events.NodeLost), 10, "the loss")[0]
    assert "it sent no heartbeat for" in lost.sentence()
    run.until(lambda: len(launch.events_of(events.RoundCompleted)) == 2, 10, "a new round")
    assert not victim.is_running()
    (tmp_path / "go").touch()
    launch.succeed()


def test_ctrl_c_on_a_terminal_stops_the_job(run, out: Path) -> None:
    """The terminal sends SIGINT to the launcher's group; the workers get it once, from their agent."""
    launch = start(run, "obedient.py", out, "--nproc-per-node=2", terminal=True)
    launch.press(b"\x03")
    _, stderr = launch.end_with(ExitCode.SIGNAL_BASE + signal.SIGINT)
    assert noted(out, "signalled") == ["SIGINT"] * 2
    assert noted(out, "saved") == [""] * 2
    assert "stopped by SIGINT" in stderr
