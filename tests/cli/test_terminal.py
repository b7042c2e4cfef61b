"""The terminal: the status line's rate and time left, ``dlrover top``, completion, names that are nearly right."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
import termios
from importlib.machinery import ModuleSpec
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from dlrover.cli import top
from dlrover.cli.main import app
from dlrover.cli.run import progress
from dlrover.cli.run.arguments import parse
from dlrover.errors import ConfigurationError, ExitCode
from dlrover.master.machine.watches.activities import Activities
from dlrover.rpc import messages
from dlrover.spec.measurements import WorkerActivity
from tests.waiting import until

STATUS = messages.Status(
    name="job", phase="running", round=1, world_size=4, restarts=1, steps=17, total_steps=1, waiting_for="",
    rate=6.789, seconds_left=200.0,
    nodes=tuple(messages.NodeState(i, i, "running", f"host{i}", True, 17, memory=1 << 30, memory_limit=2 << 30) for i in range(4)),
)  # fmt: skip
WORKER = WorkerActivity(20, 1, 0.5, (1.0, 9.0, 1.0, 0.0, 0.0, 0.0), compute=4.0)
RANKS = messages.RanksReply(
    1, tuple(messages.RankActivity(rank, rank // 2, WORKER) for rank in range(8))
)


def test_the_line_has_the_rate_and_the_time_left_and_ones_are_singular() -> None:
    line = progress.status_line(STATUS).plain
    assert (
        line == "running · 4 nodes, 4 workers · 1 step · 6.79 steps/s · 3 min 20 s left · 1 restart"
    )
    unknown = msgspec.structs.replace(STATUS, rate=0.0, seconds_left=-1.0, restarts=0)
    assert (
        progress.status_line(unknown).plain == "running · 4 nodes, 4 workers · 1 step · 0 restarts"
    )


def test_the_rate_is_that_of_the_last_minute_and_falls_in_silence() -> None:
    activities = Activities()
    assert activities.rate(0.0) == 0.0
    for now in range(0, 200, 5):
        steps = 2 * now if now < 100 else 200 + 4 * (now - 100)
        activities.note(0, messages.Heartbeat(1, steps), float(now))
    assert activities.rate(195.0) == pytest.approx(4.0)
    assert activities.rate(225.0) == pytest.approx(4.0)
    assert activities.rate(1195.0) < 0.3
    activities.note(0, messages.Heartbeat(2, 0), 1200.0)
    assert activities.rate(1200.0) == 0.0


def screen(view: top.TopView, room: int) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(top.render(STATUS, RANKS, view, room))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_top_shows_nodes_and_ranks_from_a_row_on() -> None:
    text = screen(top.TopView(), 10)
    assert "host0" in text
    assert "1.0 GiB" in text
    assert "4 nodes · q quit" in text
    ranks = screen(top.TopView(by_rank=True, first=2), 3)
    assert "3 to 5 of 8 ranks" in ranks
    assert "200.0 ms" in ranks
    assert "10.0%" in ranks


def test_the_keys_move_within_the_rows() -> None:
    view = top.TopView()
    assert view.after("up", 8, 3) == view
    assert view.after("down", 8, 3).first == 1
    assert view.after("page down", 8, 3).after("page down", 8, 3).first == 5
    assert view.after("down", 2, 3).first == 0
    assert view.after("ranks", 8, 3) == top.TopView(by_rank=True)
    assert view.after("nothing", 8, 3) == view


def test_keys_that_come_together_each_count(monkeypatch: pytest.MonkeyPatch) -> None:
    own, theirs = pty.openpty()
    with os.fdopen(theirs) as terminal:
        before = termios.tcgetattr(terminal)
        monkeypatch.setattr(sys, "stdin", terminal)
        with top._keys() as key:
            os.write(own, b"\x1b[B\x1b[6~r?\x1bOAq")
            assert [key(5.0) for _ in range(6)] == [
                "down",
                "page down",
                "ranks",
                "nothing",
                "up",
                "quit",
            ]
            assert key(0.0) == ""
        with pytest.raises(SystemExit, match="143"), top._keys():
            os.kill(os.getpid(), signal.SIGTERM)
        assert termios.tcgetattr(terminal) == before
        os.close(own)


@pytest.mark.slow
def test_top_on_a_terminal_draws_and_quits(tmp_path: Path) -> None:
    from dlrover.master.journal.file import FileJournal
    from dlrover.spec.job import JobSpec
    from dlrover.spec.jobdir import JobDir, MasterConfig
    from tests.simulation.cluster import Cluster

    cluster = Cluster(JobSpec(name="shown", min_nodes=2, max_nodes=2), nodes=2, steps=10)
    cluster.finish()
    job_dir = JobDir(tmp_path)
    journal = FileJournal(job_dir.journal)
    for time, event in cluster.journal:
        journal.append(event, time)
    journal.close()
    job_dir.job.write_bytes(msgspec.json.encode(MasterConfig(job=cluster.master.machine.job)))
    own, theirs = pty.openpty()
    command = [sys.executable, "-m", "dlrover.cli.main", "top", "--job-dir", str(tmp_path)]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    os.set_blocking(own, False)
    seen = bytearray()

    def reads() -> bool:
        with contextlib.suppress(BlockingIOError):
            seen.extend(os.read(own, 1 << 16))
        return b"2 nodes" in seen

    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        try:
            os.close(theirs)
            until(reads, 30, "the table of nodes", lambda: f": {bytes(seen)!r}")
            os.write(own, b"q")
            assert process.wait(20) == 0
        finally:
            process.kill()
            os.close(own)
    assert b"shown" in seen


def test_top_without_a_terminal_says_what_to_do(tmp_path: Path) -> None:
    from dlrover.spec.jobdir import JobDir

    with pytest.raises(ConfigurationError, match="dlrover status"):
        top.top(JobDir(tmp_path), Console(file=io.StringIO()))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_has_both_commands(shell: str) -> None:
    shown = CliRunner().invoke(app, ["completion", shell])
    assert shown.exit_code == 0, shown.output
    assert "_DLROVER_COMPLETE" in shown.stdout
    assert "dlrover-run" in shown.stdout
    assert "local-nodes" in shown.stdout


@pytest.mark.slow
def test_bash_completes_options_commands_and_jobs(tmp_path: Path) -> None:
    (tmp_path / "state" / "jobs" / "train-1").mkdir(parents=True)
    script = CliRunner().invoke(app, ["completion", "bash"]).stdout
    (tmp_path / "dlrover").write_text(
        f"#!{sys.executable}\nfrom dlrover.cli import command\ncommand()\n"
    )
    (tmp_path / "dlrover").chmod(0o755)
    ask = (
        f"{script}\nCOMP_WORDS=(dlrover-run --nproc-per-n); COMP_CWORD=1; _dlrover_run; echo ${{COMPREPLY[@]}}\n"
        "COMP_WORDS=(dlrover status tr); COMP_CWORD=2; _dlrover_completion dlrover; echo ${COMPREPLY[@]}\n"
        "COMP_WORDS=(dlrover dash); COMP_CWORD=1; _dlrover_completion dlrover; echo ${COMPREPLY[@]}\n"
    )
    env = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "DLROVER_STATE_DIR": str(tmp_path / "state"),
    }
    shown = subprocess.run(
        ["bash", "-c", ask], capture_output=True, text=True, env=env, check=False
    )
    assert shown.stdout.split() == ["--nproc-per-node", "train-1", "dashboard"], shown.stderr


def test_a_script_that_is_nearly_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(ConfigurationError, match=r"Did you mean train\.py\?$"):
        parse(["trian.py"], {})
    with pytest.raises(ConfigurationError, match=r"\(looked in .*\)\.$"):
        parse(["other.py"], {})


def test_a_module_that_is_not_there_is_named_with_the_nearest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "models").mkdir()
    for module in ("train", "json.tool", "models.any", "sys"):
        parse(["-m", module], {})
    for module, hint in (("trian", "train"), ("modles.any", "models.any")):
        with pytest.raises(ConfigurationError, match=rf"Did you mean {hint}\?$"):
            parse(["-m", module], {})
    parse(["-m", "trian"], {"PYTHON_EXEC": "another-python"})


def test_a_module_that_only_an_import_hook_finds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed for editing may have one."""

    class Hook:
        def find_spec(self, name: str, path: object = None, target: object = None) -> object:
            return ModuleSpec(name, None) if name == "installed_for_editing" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook()])
    parse(["-m", "installed_for_editing.train"], {})


def test_a_misspelt_variable_gets_a_notice(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.touch()
    (notice,) = parse([str(program)], {"PET_NPROC_PER_NOD": "2", "PET_SOMETHING": "1"}).notices
    assert notice.endswith("did you mean PET_NPROC_PER_NODE?")


def test_output_that_a_full_disk_does_not_take_is_one_sentence() -> None:
    command = [sys.executable, "-m", "dlrover.cli.main", "--help"]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == ExitCode.INFRASTRUCTURE
    assert ended.stderr == b"dlrover: The output cannot be written: No space left on device.\n"
