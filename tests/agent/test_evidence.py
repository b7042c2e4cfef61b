"""Evidence of a hang: looking at a process changes nothing about it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrover.agent.workers import evidence, workers
from dlrover.agent.workers.logs import RunLogs
from dlrover.agent.workers.workers import Worker, WorkerGroup
from dlrover.rpc import messages, wire
from dlrover.spec.failure import Failure, FailureKind
from dlrover.spec.job import Entry, LaunchSpec
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


LOADER = """
import os, sys
from dlrover.training.worker import stacks

def works_on_a_batch():
    sys.stdin.read()

def awaits_the_batch():
    print("started", flush=True)
    os.wait()

stacks.prepare()
if not all([os.fork(), os.fork()]):
    works_on_a_batch()
else:
    awaits_the_batch()
"""


@pytest.mark.parametrize("path", ["", "/nowhere"], ids=["py-spy, if installed", "no py-spy"])
def test_the_stacks_of_a_workers_children_are_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    program = tmp_path / "loader.py"
    program.write_text(LOADER)
    monkeypatch.setenv("PATH", path or os.environ["PATH"])
    with subprocess.Popen(
        [sys.executable, program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        seen: list[str] = []

        def complete() -> bool:  # a child may be between its fork and its first line
            (found,) = asyncio.run(evidence.collect([process.pid]))
            seen[:] = [found.frames[0].function, found.text]
            return "works_on_a_batch" in found.text

        until(complete, 20, "the stack of a child")
        assert seen[0] == "awaits_the_batch"
        own, _, children = seen[1].partition("\nchild process")
        assert "awaits_the_batch" in own
        assert "works_on_a_batch" not in own
        assert f" of process {process.pid}:\n" in children
        process.kill()


def test_a_process_that_a_user_has_stopped_stays_stopped(
    worker: subprocess.Popen[bytes], py_spy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAIT", "0")
    worker.send_signal(signal.SIGSTOP)
    until(lambda: state_of(worker) == "T", 10, "state T")
    asyncio.run(evidence.collect([worker.pid]))
    assert state_of(worker) == "T"


def test_the_evidence_of_hundreds_of_workers_is_one_message(
    worker: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = f"/home/me/{'project/' * 10}train.py"
    frames = "".join(f"    function_{number} ({file}:{number})\n" for number in range(500))
    (tmp_path / "dump").write_text(f'Thread 1 (idle): "MainThread"\n{frames}')
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\nexec cat {tmp_path}/dump\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    count = 200
    found = asyncio.run(evidence.collect([worker.pid] * count))
    assert [one.frames[0].function for one in found] == ["function_0"] * count
    assert all("characters left out" in one.text for one in found)
    sent = wire.encode(messages.Evidence(1, 1, tuple(found)))
    assert len(sent) < wire.MAX_MESSAGE_BYTES


def test_the_last_exception_that_ended_a_thread_is_found_in_standard_error():
    first, last = (
        "Exception in thread A:\nKeyError: 1\n",
        "Exception in thread B:\nKeyError: 2\nmore",
    )
    assert evidence.thread_error("step 3\n" + first + last, 8) == last
    assert evidence.thread_error("step 3\nKeyError: 1", 8) == ""
    workers = 1024
    longest = evidence.thread_error(first + "漢" * 100_000, workers)
    assert len(longest.encode()) * workers < wire.MAX_MESSAGE_BYTES // 2


GAVE_UP = Failure(
    id="1", kind=FailureKind.EXCEPTION, node_id=0, rank=0, local_rank=0, round=1,
    exception="RuntimeError", message="Timed out waiting 5000ms for recv operation",
)  # fmt: skip


async def reports(tmp_path: Path) -> list[tuple[int, Failure]]:
    """Return what a node reports of a rank that gave up, as its workers are stopped beside another one that runs."""
    launch = LaunchSpec(entry=Entry.SCRIPT, target="train.py")
    group = WorkerGroup(launch, {}, RunLogs(launch, tmp_path), "host")
    reported = []
    group.on_exit = lambda *report: reported.append(report)
    group._workers = {1: Worker(1, 1, pid=os.getpid())}
    group._report(0, GAVE_UP)
    # A whole stop would end all children of this process.
    await asyncio.wait_for(group._end_search(), 20.0)
    group._workers = {}
    await group.close()
    return reported


def test_who_gives_up_on_a_collective_is_reported_although_no_process_can_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_pids: object) -> list[str]:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(evidence, "not_joined", fails)
    assert asyncio.run(reports(tmp_path)) == [(0, GAVE_UP)]


def test_a_stop_does_not_wait_for_long_for_who_did_not_join_a_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "not_joined", lambda _pids: asyncio.sleep(60.0))
    monkeypatch.setattr(workers, "EXPLAIN_WAIT", 0.1)
    assert asyncio.run(reports(tmp_path)) == [(0, GAVE_UP)]


def test_who_gives_up_on_a_collective_is_known_by_the_words_of_pytorch() -> None:
    def failure(kind: FailureKind, **facts: object) -> Failure:
        return Failure(id="1", kind=kind, node_id=0, rank=0, local_rank=0, round=1, **facts)

    words = "Timed out waiting 5000ms for recv operation to complete"
    error, signal_ = FailureKind.EXCEPTION, FailureKind.SIGNAL
    watchdog = "Watchdog caught collective operation timeout"
    assert evidence.gave_up(failure(error, exception="RuntimeError", message=words))
    assert evidence.gave_up(failure(signal_, signal=signal.SIGABRT, stderr_tail=watchdog))
    assert not evidence.gave_up(failure(error, exception="ReadTimeout", message=words))
    assert not evidence.gave_up(failure(error, exception="RuntimeError", message="no data"))
    assert not evidence.gave_up(failure(signal_, signal=signal.SIGKILL, stderr_tail=watchdog))
