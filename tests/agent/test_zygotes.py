"""A zygote that does not get ready: it is waited for once."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from dlrover._util import procs
from dlrover.agent.workers import zygotes
from dlrover.agent.workers.zygote import StartOrder
from dlrover.agent.workers.zygotes import ZygoteProcess
from dlrover.training.worker.bootstrap import Program
from tests.waiting import until

WAIT = 0.05
MANY = 400


def order(spawn: int) -> StartOrder:
    return StartOrder(spawn, Program("script", "x.py", [], "", 0), {}, "", "")


class Waiting:
    """A zygote that is stuck, and the orders that did not wait for it any longer."""

    def __init__(self, python: str) -> None:
        self.elsewhere: list[int] = []
        board = zygotes.make_board()
        self.zygote = ZygoteProcess(
            python, {}, board, "x", lambda *_: None, lambda *_: None, lambda _: None, self._unfit
        )
        os.close(board)

    def _unfit(self, orders: list[StartOrder]) -> None:
        self.elsewhere += [order.spawn for order in orders]


@pytest.fixture
def played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Callable[[Waiting], Coroutine[None, None, None]]], None]:
    monkeypatch.setattr(zygotes, "READY_WAIT", WAIT)
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 60\n")
    stuck.chmod(0o755)

    def run(test: Callable[[Waiting], Coroutine[None, None, None]]) -> None:
        async def main() -> None:
            waiting = Waiting(str(stuck))
            try:
                await test(waiting)
            finally:
                waiting.zygote.process.kill()  # it would not see that the socket closes
                waiting.zygote.close()
                await waiting.zygote.wait()

        asyncio.run(main())

    return run


def test_one_that_is_stuck_is_waited_for_once(played, caplog: pytest.LogCaptureFixture) -> None:
    async def test(waiting: Waiting) -> None:
        waiting.zygote.spawn(order(1))
        await asyncio.sleep(2 * WAIT)
        assert waiting.elsewhere == [1]
        assert waiting.zygote.problem == f"it was not ready after {WAIT:g} s"
        assert caplog.text.count("is not ready after") == 1
        waiting.zygote.spawn(order(2))
        assert waiting.elsewhere == [1, 2]

    played(test)


def test_restarts_while_it_is_waited_for_wait_no_longer_together(played) -> None:
    async def test(waiting: Waiting) -> None:
        for number in range(6):
            waiting.zygote.spawn(order(number))
            await asyncio.sleep(WAIT / 2)
            if not waiting.zygote.problem:
                waiting.zygote.take_held()
        assert waiting.zygote.problem

    played(test)


def test_one_that_is_late_is_used_when_it_is_ready(played) -> None:
    async def test(waiting: Waiting) -> None:
        waiting.zygote.spawn(order(1))
        await asyncio.sleep(2 * WAIT)
        waiting.zygote._take({"ready": 1.0, "problem": ""})
        waiting.zygote.spawn(order(2))
        assert waiting.zygote.workers == {2}

    played(test)


def test_no_timer_outlives_the_wait(played) -> None:
    async def test(waiting: Waiting) -> None:
        waiting.zygote.spawn(order(1))
        waiting.zygote._take({"ready": 1.0, "problem": ""})
        assert waiting.zygote.workers == {1}
        await asyncio.sleep(2 * WAIT)
        assert (waiting.zygote.problem, waiting.elsewhere) == ("", [])
        assert waiting.zygote._timer.cancelled()

    played(test)


def test_a_zygote_whose_agent_has_left_says_nothing() -> None:
    """It gets ready when the job ends; its traceback would follow the last screen."""
    ours, theirs = socket.socketpair()
    board = zygotes.make_board()
    start = (
        f"from dlrover.agent.workers import zygote; zygote.main({theirs.fileno()}, {board}, '', ())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", start],
        pass_fds=(theirs.fileno(), board),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    ours.settimeout(25)
    assert ours.recv(1), "it has reported that it is ready"
    ours.close()
    output, _ = process.communicate(timeout=25)
    theirs.close()
    os.close(board)
    assert (process.returncode, output) == (0, b"")


FORKS = """
import os, signal, sys
child = os.fork()
if child:
    print(child, flush=True)
signal.pause()
"""


@pytest.mark.slow
def test_the_processes_of_workers_end_with_the_agent(tmp_path: Path) -> None:
    """Files of the program's directories are not taken for modules of the standard library."""
    for name in ("asyncio", "logging", "ssl", "heapq", "locale", "string"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')")
    (tmp_path / "forks.py").write_text(FORKS)
    output = tmp_path / "output"

    async def main() -> int:
        loop = asyncio.get_running_loop()
        board = zygotes.make_board()
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        started = zygotes.ZygoteProcess(
            sys.executable, env, board, "", lambda *_: None, lambda *_: None, lambda _: None
        )
        os.close(board)
        program = Program("script", str(tmp_path / "forks.py"), [], "", 0)
        started.spawn(StartOrder(1, program, env, str(output), os.devnull))
        try:
            text = await loop.run_in_executor(
                None, lambda: until(lambda: output.exists() and output.read_text())
            )
        finally:
            started.close()
            await started.wait()
        assert started.process.returncode == 0
        return int(text)

    child = asyncio.run(main())
    until(lambda: procs.stat(child)[:1] in ([], ["Z"]), 10)


@pytest.mark.slow
def test_more_workers_than_fit_into_a_socket_start_and_end() -> None:
    """Orders and reports fill the sockets of both sides; neither waits for the other to read first."""
    ended: dict[int, int] = {}

    async def main() -> None:
        loop = asyncio.get_running_loop()
        all_ended = loop.create_future()

        def exited(worker: int, status: int, _problem: str) -> None:
            ended[worker] = status
            if len(ended) == MANY:
                all_ended.set_result(None)

        board = zygotes.make_board()
        started = zygotes.ZygoteProcess(
            sys.executable, dict(os.environ), board, "", lambda *_: None, exited, lambda _: None
        )
        os.close(board)
        for number in range(MANY):
            program = Program("command", "true", [], "", 0)
            started.spawn(StartOrder(number, program, dict(os.environ), os.devnull, os.devnull))
        try:
            await asyncio.wait_for(all_ended, 60)
        finally:
            started.close()
            await started.wait()

    asyncio.run(main())
    assert set(ended.values()) == {0}
