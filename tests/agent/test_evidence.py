"""Evidence of a hang: looking at a process changes nothing about it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.agent.workers import evidence
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        yield process
        process.kill()


def state_of(process: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A py-spy that leaves what it looks at stopped, prints one line and goes on for long."""
    program = tmp_path / "py-spy"
    program.write_text(
        '#!/bin/sh\nkill -STOP "$4"\nsleep 0.1\necho "Thread 1"\nexec sleep "$WAIT"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize("wait", ["0", "60"])
def test_a_process_that_the_tracer_left_stopped_goes_on(
    worker: subprocess.Popen[bytes], py_spy: None, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    monkeypatch.setenv("WAIT", wait)
    monkeypatch.setattr(evidence, "PY_SPY_TIME", 1.0)
    (found,) = asyncio.run(evidence.collect([worker.pid]))
    assert found.source == ("py-spy" if wait == "0" else "")
    until(lambda: state_of(worker) == "S", 10, "state S")


def test_a_process_that_a_user_has_stopped_stays_stopped(
    worker: subprocess.Popen[bytes], py_spy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAIT", "0")
    worker.send_signal(signal.SIGSTOP)
    until(lambda: state_of(worker) == "T", 10, "state T")
    asyncio.run(evidence.collect([worker.pid]))
    assert state_of(worker) == "T"
