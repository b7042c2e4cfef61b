"""A worker's standard streams on a full disk: nothing is lost but what exceeds the overflow."""

import contextlib
import io
import resource
from pathlib import Path

import pytest

from dlrover.agent.workers import output
from dlrover.agent.workers.logs import RunLogs
from dlrover.spec.job import Entry, LaunchSpec, Std, StdMap


@contextlib.contextmanager
def no_file_beyond(size: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def stream(tmp_path: Path):
    with (tmp_path / "file").open("ab", buffering=0) as file:
        yield output._Output(file.fileno(), "<stdout>", str(tmp_path / "overflow"))


def test_what_the_file_does_not_take_goes_to_the_overflow(stream, tmp_path: Path) -> None:
    with no_file_beyond(10):
        assert stream.write(b"0123456789abc") == 13
        assert stream.write(b"def") == 3
    assert stream.write(b"ghi") == 3
    assert (tmp_path / "file").read_bytes() == b"0123456789ghi"
    assert (tmp_path / "overflow").read_bytes() == b"abcdef"


def test_an_overflow_is_bounded(stream, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(output, "OVERFLOW_LIMIT", 4096)
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    with no_file_beyond(1 << 20):
        for _ in range(100):
            assert stream.write(bytes(4096)) == 4096
    assert (tmp_path / "overflow").stat().st_size == 4096


def test_without_an_agent_the_program_learns_of_its_full_disk(stream, tmp_path: Path) -> None:
    (tmp_path / "overflow").mkdir()
    with no_file_beyond(0), pytest.raises(OSError, match="File too large"):
        stream.write(b"x")


def test_the_console_shows_an_overflow_and_frees_its_memory(tmp_path: Path) -> None:
    launch = LaunchSpec(entry=Entry.SCRIPT, target="train.py", tee=StdMap(Std.ALL))
    logs = RunLogs(launch, tmp_path).attempt(0, {0: 0})
    fd = output._append_to(logs.overflow(0, Std.ERR))
    out, err = io.BytesIO(), io.BytesIO()
    logs.stderr(0).write_bytes(b"in the file\n")
    logs.start(out, err)
    line = b"x" * 1023 + b"\n"
    with open(fd, "ab", buffering=0) as overflow:
        overflow.writelines([line] * 1024)
        overflow.write(b"the end\n")
        tail = logs.stderr_tail(0)
        logs.stop()
        assert Path(f"/proc/self/fd/{fd}").stat().st_blocks * 512 < 1 << 18
    shown = err.getvalue().splitlines()
    assert shown[0] == b"[default0]:in the file"
    assert len(shown) == 1026
    assert tail.endswith("x\nthe end\n")
