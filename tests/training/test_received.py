"""A program that ends because it was asked to from outside, and handles that, has not ended by itself."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from dlrover.training.worker import ownends
from dlrover.training.worker.ownends import ASKED_WITHIN, Received
from tests.training.programs import Zygote, check_same, write

BEGIN = """
import os, signal, subprocess, sys
def ask():
    signal.pthread_sigmask(signal.SIG_BLOCK, {15})
    child = os.fork()
    if not child:
        os.kill(os.getppid(), 15)
        os._exit(0)
    os.waitpid(child, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {15})
"""
ASKED = {
    "the handler exits": """
def on_term(number, frame):
    sys.exit(1)
signal.signal(signal.SIGTERM, on_term)
ask()
""",
    "the loop exits when the handler has set a flag": """
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
ask()
while not asked:
    pass
print("stores a checkpoint")
sys.exit(1)
""",
    "the handler sends the signal again": """
def on_term(number, frame):
    print("cleans up")
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
signal.signal(signal.SIGTERM, on_term)
ask()
""",
    "the handler raises": """
class Preempted(Exception): pass
def on_term(number, frame):
    raise Preempted("by the cluster")
signal.signal(signal.SIGTERM, on_term)
ask()
""",
}
NOT_ASKED = {
    "it asks itself": """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
os.kill(os.getpid(), 0)
os.kill(os.getpid(), signal.SIGTERM)
""",
    "it asks itself, and is asked later": """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.kill(os.getpid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda *_: print("goes on"))
signal.raise_signal(signal.SIGTERM)
sys.exit(1)
""",
    "a mistake after the signal": """
signal.signal(signal.SIGTERM, lambda *_: print("goes on"))
ask()
{}["rate"]
""",
    "a child was asked": """
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
child = os.fork()
if not child:
    signal.pause()
import time
time.sleep(0.1)
subprocess.run(["kill", "-TERM", str(child)], check=True)
os.wait()
sys.exit(1)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*ASKED, *NOT_ASKED])
def test_a_program_that_is_asked_to_stop_says_by_which_signal(tmp_path: Path, case: str) -> None:
    worker = check_same(tmp_path, BEGIN + (ASKED | NOT_ASKED)[case])
    assert worker.error is not None
    extra = worker.error["message"]["extraInfo"]
    assert extra.get("handled_signal", 0) == (signal.SIGTERM if case in ASKED else 0)
    assert "ownends.py" not in extra["py_callstack"]


FINISHES = """
from dlrover import launched
launched.trains = lambda: {trains}
launched.finished = lambda: print("finished", flush=True)
signal.signal(signal.SIGTERM, lambda *_: {handler})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trains", "handler", "end", "code"),
    [
        (True, "sys.exit(0)", "ask()", 143),
        (True, "os._exit(0)", "ask()", 143),
        (False, "sys.exit(0)", "ask()", 0),
        (False, "os._exit(0)", "ask()", 0),
        (True, "None", "ask(); sys.exit(0)", 0),
        (True, "None", "ask(); os._exit(0)", 0),
    ],
)
def test_a_rank_that_leaves_the_others_for_a_signal_has_not_finished(
    tmp_path: Path, trains: bool, handler: str, end: str, code: int
) -> None:
    """Before, its exit code of 0 ended the training of the others."""
    write(tmp_path, program=BEGIN + FINISHES.format(trains=trains, handler=handler) + end)
    (worker,) = Zygote(tmp_path).run(("program.py",))
    assert (worker.ended.code, worker.ended.stdout) == (code, "" if code else "finished\n")
    asked = worker.error["message"]["extraInfo"]["handled_signal"] if worker.error else 0
    assert asked == (signal.SIGTERM if code else 0)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Received:
    """What this process receives, while a test runs."""
    for name in ("signal", "getsignal"):
        monkeypatch.setattr(signal, name, getattr(signal, name))
    found = Received(os.getpid())
    ownends.watch_signals(found)
    return found


def test_the_program_sees_its_own_handlers(watched: Received) -> None:
    def handler(*_: object) -> None: ...

    before = signal.signal(signal.SIGUSR1, handler)
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert signal.signal(signal.SIGUSR1, before) is handler
    assert signal.getsignal(signal.SIGUSR1) is before
    assert watched.lately() == 0


def test_a_signal_counts_for_a_while(watched: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert watched.lately() == signal.SIGUSR1
    later = time.monotonic() + ASKED_WITHIN
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert watched.lately() == 0
    assert watched.behind(sys.exc_info()[2]) == 0
