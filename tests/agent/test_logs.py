"""The workers' log files and the console, compared with torchrun's."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.agent.workers.logs import AttemptLogs, ConsoleMode, RunLogs, console_mode, line_prefix
from dlrover.errors import ConfigurationError
from dlrover.spec.job import Entry, LaunchSpec, Std, StdMap


def launch_spec(**options) -> LaunchSpec:
    return LaunchSpec(entry=Entry.SCRIPT, target="train.py", **options)


class Blocked(io.RawIOBase):
    """A console on which a write takes until the test lets it go."""

    def __init__(self):
        self.released = threading.Event()

    def write(self, data):
        self.released.wait()
        return len(data)


def copied(logs: AttemptLogs) -> tuple[bytes, bytes]:
    """What the two consoles got of files that are complete."""
    out, err = io.BytesIO(), io.BytesIO()
    logs.start(out, err)
    logs.stop()
    return out.getvalue(), err.getvalue()


class TestLayout:
    def test_each_attempt_has_a_directory_per_worker(self, tmp_path: Path):
        run = RunLogs(launch_spec(run_id="job"), tmp_path / "made" / "on demand")
        assert not (tmp_path / "made").exists()
        logs = run.attempt(2, {0: 8, 1: 9})
        assert logs.directory.name == "attempt_2"
        assert re.fullmatch(r"job_\w+", logs.directory.parent.name)
        assert logs.stdout(1) == logs.directory / "1" / "stdout.log"
        assert sorted(path.name for path in logs.directory.iterdir()) == ["0", "1"]
        assert run.attempt(3, {0: 0}).directory.parent == logs.directory.parent

    def test_two_runs_with_one_id_share_nothing(self, tmp_path: Path):
        runs = [RunLogs(launch_spec(run_id="a/b"), tmp_path) for _ in range(2)]
        directories = {run.attempt(0, {0: 0}).directory for run in runs}
        assert len(directories) == 2
        assert all(path.parent.parent == tmp_path for path in directories)

    def test_an_attempt_that_is_not_counted_leaves_the_one_before(self, tmp_path: Path):
        run = RunLogs(launch_spec(), tmp_path)
        names = []
        for text in ("first", "second", "third"):
            logs = run.attempt(1, {0: 0})
            logs.stderr(0).write_text(text)
            names.append(logs.directory.name)
        assert names == ["attempt_1", "attempt_1.1", "attempt_1.2"]
        assert run.attempt(2, {0: 0}).directory.name == "attempt_2"
        assert (run.directory / "attempt_1/0/stderr.log").read_text() == "first"

    def test_paths_are_absolute(self, tmp_path: Path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        logs = RunLogs(launch_spec(), Path("here")).attempt(0, {0: 0})
        assert logs.directory.parent.parent == tmp_path / "here"
        assert logs.error_file(0).parent.is_dir()

    @pytest.mark.parametrize("below", [".", "deeper"])
    def test_a_file_as_log_directory_is_refused(self, below, tmp_path: Path):
        (tmp_path / "file").touch()
        run = RunLogs(launch_spec(), tmp_path / "file" / below)
        with pytest.raises(ConfigurationError, match="--log-dir takes a directory"):
            run.attempt(0, {0: 0})


class TestConsole:
    def test_raw_hidden_and_teed_streams(self, tmp_path: Path):
        launch = launch_spec(
            role="trainer",
            redirects=StdMap(by_rank={1: Std.ALL, 2: Std.ALL}),
            tee=StdMap(by_rank={2: Std.ERR}),
        )
        logs = RunLogs(launch, tmp_path).attempt(0, {0: 4, 1: 5, 2: 6})
        for local_rank in range(3):
            logs.stdout(local_rank).write_bytes(b"out %d \xff\r" % local_rank)
            logs.stderr(local_rank).write_bytes(b"err %d\n" % local_rank)
        assert copied(logs) == (b"out 0 \xff\r", b"err 0\n[trainer2]:err 2\n")

    def test_filtered_files_gather_teed_streams_that_the_console_shows(self, tmp_path: Path):
        launch = launch_spec(
            tee=StdMap(by_rank={0: Std.ALL, 1: Std.OUT, 2: Std.ALL}),
            local_ranks_filter=(0, 1, 3),
            duplicate_stdout_filters=("loss", "acc"),
            duplicate_stderr_filters=("Error",),
        )
        logs = RunLogs(launch, tmp_path).attempt(0, dict.fromkeys(range(4), 0))
        for rank in range(4):
            logs.stdout(rank).write_text(f"loss {rank}\nstep {rank}\nacc {rank}")
            logs.stderr(rank).write_text(f"warning {rank}\nValueError {rank}\n")
        out, err = copied(logs)
        filtered = (logs.directory / "filtered_stdout.log").read_text()
        assert sorted(filtered.splitlines()) == [
            *("[default0]:acc 0", "[default0]:loss 0"),
            *("[default1]:acc 1", "[default1]:loss 1"),
        ]
        assert (logs.directory / "filtered_stderr.log").read_text() == "[default0]:ValueError 0\n"
        assert b"[default1]:step 1\n" in out  # the console has the other lines too
        assert b"loss 2" not in out
        assert b"[default0]:warning 0\n" in err

    def test_without_filters_there_are_no_filtered_files(self, tmp_path: Path):
        logs = RunLogs(launch_spec(tee=StdMap(Std.ALL)), tmp_path).attempt(0, {0: 0})
        copied(logs)
        assert [path.name for path in logs.directory.iterdir()] == ["0"]

    def test_null_device_as_log_directory_shows_all_and_keeps_files(self, tmp_path: Path):
        launch = launch_spec(
            log_dir=os.devnull,
            tee=StdMap(Std.OUT),
            redirects=StdMap(Std.ALL),
            local_ranks_filter=(1,),
        )
        logs = RunLogs(launch, tmp_path).attempt(0, {0: 0})
        logs.stdout(0).write_text("out")
        logs.stderr(0).write_text("err")
        assert copied(logs) == (b"out", b"err")
        assert logs.stderr_tail(0) == "err"

    def test_a_console_that_blocks_is_named_once_with_the_place_of_the_files(
        self, tmp_path, caplog
    ):
        logs = RunLogs(launch_spec(), tmp_path).attempt(0, {0: 0})
        logs.stdout(0).write_text("text")
        console = Blocked()
        logs.start(console, io.BytesIO())
        logs.stop(timeout=0.05)
        logs.stop(timeout=60)  # the second finds nothing to do
        console.released.set()
        assert [record.message for record in caplog.records] == [
            f"The console did not take all worker output within 0.05 s; it is whole in {logs.directory}"
        ]

    def test_stop_without_start_does_nothing(self, tmp_path: Path):
        RunLogs(launch_spec(), tmp_path).attempt(0, {0: 0}).stop()

    def test_prefix_template(self):
        launch = launch_spec(
            role="r", log_line_prefix_template="${role_name}/$rank/${local_rank} $x|"
        )
        assert line_prefix(launch, local_rank=1, rank=9) == "r/9/1 $x|"
        assert line_prefix(launch_spec(role="r"), local_rank=1, rank=9) == "[r1]:"


class TestStderrTail:
    @pytest.fixture
    def logs(self, tmp_path: Path) -> AttemptLogs:
        return RunLogs(launch_spec(), tmp_path).attempt(0, {0: 0})

    def test_a_worker_that_never_started_has_none(self, logs):
        assert logs.stderr_tail(0) == ""

    def test_bytes_that_are_no_text_are_replaced(self, logs):
        logs.stderr(0).write_bytes(b"bad \xff byte\n")
        assert logs.stderr_tail(0) == "bad \ufffd byte\n"

    def test_standard_output_stands_in_for_it_where_only_that_explains_the_end(self, logs):
        logs.stdout(0).write_text("FATAL: no license\n")
        assert logs.last_words(0, signaled=False) == ("FATAL: no license\n", logs.stdout(0))
        logs.stderr(0).write_text("a warning\n")
        assert logs.last_words(0, signaled=False) == ("a warning\n", logs.stderr(0))
        trace = "Traceback (most recent call last):\nKeyError: 1\n"
        logs.stdout(0).write_text(trace)
        assert logs.last_words(0, signaled=False) == (trace, logs.stdout(0))
        assert logs.last_words(0, signaled=True) == ("a warning\n", logs.stderr(0))
        logs.stderr(0).write_text(f"a warning\n{trace}")
        assert logs.last_words(0, signaled=False) == (f"a warning\n{trace}", logs.stderr(0))

    def test_it_is_the_last_characters(self, logs):
        @given(st.text("aé漢🙂\n", max_size=60), st.integers(0, 12))
        @settings(max_examples=50, deadline=None)
        def check(text, limit):
            logs.stderr(0).write_bytes(text.encode())
            assert logs.stderr_tail(0, limit) == (text[-limit:] if limit else "")

        check()

    def test_only_the_end_of_a_large_file_is_read(self, logs):
        with logs.stderr(0).open("wb") as file:
            file.truncate(1 << 40)  # sparse
            file.seek(0, os.SEEK_END)
            file.write(b"the end")
        assert logs.stderr_tail(0, 7) == "the end"


PROGRAM = """
import os, sys
rank = os.environ["LOCAL_RANK"]
sys.stdout.write(f"SAYS {rank} 10%\\rSAYS {rank} 20%\\r\\nSAYS {rank} loss\\n")
sys.stderr.write(f"SAYS {rank} warning\\nSAYS {rank} Error\\n" * 100)
"""
TEMPLATE = "<${role_name} $rank ${local_rank} $other>"
CASES = {
    "redirect, tee and both filters": (
        "-r 0:1 -t 1:3,2:2 --duplicate-stdout-filters loss,10 --duplicate-stderr-filters Error",
        launch_spec(
            redirects=StdMap(by_rank={0: 1}),
            tee=StdMap(by_rank={1: 3, 2: 2}),
            duplicate_stdout_filters=("loss", "10"),
            duplicate_stderr_filters=("Error",),
        ),
    ),
    "rank filter, role and template": (
        "-t 3 --local-ranks-filter 0,2 --role trainer",
        launch_spec(
            tee=StdMap(3),
            local_ranks_filter=(0, 2),
            role="trainer",
            log_line_prefix_template=TEMPLATE,
        ),
    ),
}


@pytest.mark.slow
@pytest.mark.torch
class TestAgainstTorch:
    """torch's public `DefaultLogsSpecs` and a real torchrun are the reference."""

    @pytest.fixture(autouse=True)
    def _needs_filters(self):
        torch_mp = pytest.importorskip("torch.distributed.elastic.multiprocessing")
        if not hasattr(torch_mp.LogsDest(), "filtered_stdout"):
            pytest.skip("this torch has no filtered log files")

    def test_layout(self, tmp_path: Path):
        environ = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"}
        theirs = torch_logs(tmp_path, environ, redirects=Std.ALL)
        launch = launch_spec(
            run_id="job", duplicate_stdout_filters=("x",), duplicate_stderr_filters=("x",)
        )
        ours = RunLogs(launch, tmp_path).attempt(2, {rank: rank for rank in range(3)})
        copied(ours)

        def within_run(path: str | Path) -> str:
            run, *rest = Path(path).relative_to(tmp_path).parts
            assert re.fullmatch(r"job_\w{8}", run)
            return "/".join(rest)

        for rank in range(3):
            assert within_run(ours.stdout(rank)) == within_run(theirs.stdouts[rank])
            assert within_run(ours.stderr(rank)) == within_run(theirs.stderrs[rank])
            assert within_run(ours.error_file(rank)) == within_run(theirs.error_files[rank])
        assert {within_run(path) for path in ours.directory.glob("filtered*")} == {
            within_run(theirs.filtered_stdout),
            within_run(theirs.filtered_stderr),
        }

    def test_what_the_console_shows(self, tmp_path: Path):
        @given(SELECTIONS, SELECTIONS, st.sets(st.integers(0, 2)), st.booleans())
        @settings(max_examples=150, deadline=None)
        def check(redirects, tee, ranks, discard):
            log_dir = os.devnull if discard else str(tmp_path)
            theirs = torch_logs(log_dir, {}, redirects, tee, ranks)
            launch = launch_spec(
                redirects=std_map(redirects),
                tee=std_map(tee),
                local_ranks_filter=tuple(ranks),
                log_dir=log_dir,
            )
            for rank in range(3):
                out = torch_mode(rank, theirs.stdouts, theirs.tee_stdouts)
                err = torch_mode(rank, theirs.stderrs, theirs.tee_stderrs)
                assert console_mode(launch, rank, Std.OUT) is out
                assert console_mode(launch, rank, Std.ERR) is err

        check()

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.timeout(120)
    def test_same_output_as_torchrun(self, case, tmp_path: Path):
        flags, launch = CASES[case]
        program = tmp_path / "train.py"
        program.write_text(PROGRAM)
        theirs = torchrun(program, flags, launch.log_line_prefix_template, tmp_path / "theirs")
        assert supervised(program, launch, tmp_path / "ours") == theirs
        assert theirs["out"]
        assert theirs["err"]


Selection = Std | dict[int, Std]
EVERY_STD = [Std(value) for value in range(4)]
SELECTIONS = st.one_of(
    st.sampled_from(EVERY_STD),
    st.dictionaries(st.integers(0, 2), st.sampled_from(EVERY_STD), max_size=3),
)


def std_map(selection: Selection) -> StdMap:
    return StdMap(by_rank=selection) if isinstance(selection, dict) else StdMap(selection)


def torch_logs(
    log_dir: Path | str,
    environ: dict[str, str],
    redirects: Selection = Std.NONE,
    tee: Selection = Std.NONE,
    ranks: set[int] | None = None,
):
    """The files that torchrun makes for three workers."""
    from torch.distributed.elastic import multiprocessing as torch_mp

    def torch_std(selection: Selection):
        if isinstance(selection, dict):
            return {rank: torch_mp.Std(std) for rank, std in selection.items()}
        return torch_mp.Std(selection)

    specs = torch_mp.DefaultLogsSpecs(str(log_dir), torch_std(redirects), torch_std(tee), ranks)
    return specs.reify({rank: dict(environ) for rank in range(3)})


def torch_mode(rank: int, files: dict[int, str], teed: dict[int, str]) -> ConsoleMode:
    if not files[rank]:
        return ConsoleMode.RAW
    return ConsoleMode.PREFIXED if rank in teed else ConsoleMode.HIDDEN


def said(data: bytes) -> list[bytes]:
    """The program's lines, in an order that does not depend on time."""
    return sorted(line for line in data.split(b"\n") if b"SAYS" in line)


def filtered_files(base: Path) -> dict[str, list[bytes]]:
    return {path.name: said(path.read_bytes()) for path in base.glob("*/attempt_0/filtered_*")}


def torchrun(program: Path, flags: str, template: str, base: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template,
    }
    result = subprocess.run(
        [*command, "--log-dir", str(base), *flags.split(), str(program)],
        env=environ,
        capture_output=True,
        check=True,
        timeout=100,
    )
    return {"out": said(result.stdout), "err": said(result.stderr), **filtered_files(base)}


def supervised(program: Path, launch: LaunchSpec, base: Path):
    logs = RunLogs(launch, base).attempt(0, {rank: rank for rank in range(3)})
    out, err = io.BytesIO(), io.BytesIO()
    logs.start(out, err)
    for rank in range(3):
        with logs.stdout(rank).open("ab") as stdout, logs.stderr(rank).open("ab") as stderr:
            environ = {**os.environ, "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-u", str(program)]
            subprocess.run(command, stdout=stdout, stderr=stderr, env=environ, check=True)
    logs.stop()
    return {"out": said(out.getvalue()), "err": said(err.getvalue()), **filtered_files(base)}
