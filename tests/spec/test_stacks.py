"""Stacks as py-spy and faulthandler write them, and what those of many ranks say together."""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from dlrover.spec import stacks
from dlrover.spec.stacks import Frame, WorkerEvidence

TORCH = "/venv/lib/python3.11/site-packages/torch"
ALL_REDUCE = (
    Frame("all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 2800),
    Frame("wrapper", f"{TORCH}/distributed/c10d_logger.py", 83),
    Frame("main", "/home/me/train.py", 88),
)
BACKWARD = (
    Frame("_engine_run_backward", f"{TORCH}/autograd/graph.py", 869),
    Frame("Tensor.backward", f"{TORCH}/_tensor.py", 623),
    Frame("main", "/home/me/train.py", 80),
)
ITEM = (Frame("main", "/home/me/train.py", 90),)
READS = (
    Frame("read", "/usr/lib/python3.11/gzip.py", 5),
    Frame("__getitem__", "/home/me/data.py", 41),
    Frame("fetch", f"{TORCH}/utils/data/_utils/fetch.py", 54),
    Frame("_BaseDataLoaderIter.__next__", f"{TORCH}/utils/data/dataloader.py", 725),
    Frame("main", "/home/me/train.py", 70),
)
QUEUE = (
    Frame("select", "/usr/lib/python3.11/selectors.py", 415),
    Frame("_try_get_data", f"{TORCH}/utils/data/dataloader.py", 1133),
    Frame("_BaseDataLoaderIter.__next__", f"{TORCH}/utils/data/dataloader.py", 725),
    Frame("timed", "/venv/lib/python3.11/site-packages/dlrover/training/worker/hooks.py", 177),
    Frame("main", "/home/me/train.py", 70),
)


def at(frames: tuple[Frame, ...], *ranks: int, state: str = "S") -> list[WorkerEvidence]:
    return [WorkerEvidence(pid=1, time=0.0, rank=r, frames=frames, state=state) for r in ranks]


@pytest.mark.parametrize(
    ("frames", "place", "waits"),
    [
        (ALL_REDUCE, "all_reduce (distributed_c10d.py:2800), called by main (train.py:88)", True),
        (BACKWARD, "_engine_run_backward (graph.py:869), called by main (train.py:80)", True),
        (ITEM, "main (train.py:90)", False),
        (READS, "__getitem__ (data.py:41)", False),
        (
            QUEUE,
            "_BaseDataLoaderIter.__next__ (dataloader.py:725), called by main (train.py:70)",
            False,
        ),
        ((), "", False),
        (
            (Frame("select", "/usr/lib/python3.11/selectors.py", 4),),
            "select (selectors.py:4)",
            False,
        ),
    ],
)
def test_places(frames, place: str, waits: bool):
    assert stacks.place(frames) == place
    assert stacks.waits_for_others(frames) == waits


@pytest.mark.parametrize(
    ("evidence", "missing", "expected"),
    [
        (at(ALL_REDUCE, *range(62)) + at(READS, 62), (), (62,)),
        (at(BACKWARD, 0) + at(READS, 1), (), (1,)),
        (at(ITEM, *range(7)) + at(READS, 7), (), (7,)),
        (at(ITEM, *range(5)) + at(BACKWARD, 5, 6) + at(READS, 7), (), (7,)),
        (at(ALL_REDUCE, 0, 1, 2) + at(BACKWARD, 3), (), (3,)),
        (at(ALL_REDUCE, 0, 1, 2, 3), (), ()),
        (at(READS, 0, 1, 2, 3), (), ()),
        (at(ALL_REDUCE, 0, 1) + at(BACKWARD, 2, 3), (), ()),
        (at(ALL_REDUCE, 0) + at(READS, 1) + at(QUEUE, 2), (), (1, 2)),
        (at(READS, 0), (), (0,)),
        (at(ALL_REDUCE, 0, 1), (2,), (2,)),
        (at(ALL_REDUCE, 0, 1) + at(ALL_REDUCE, 2, state="T"), (), (2,)),
    ],
)
def test_culprits(evidence, missing, expected):
    assert stacks.culprits(stacks.groups(evidence), missing) == expected


def test_words_for_groups():
    found = stacks.groups(at(ALL_REDUCE, *range(62)) + at(READS, 17 + 60) + at((), 99))
    assert stacks.in_words(found, [100, 101]) == (
        "62 ranks in all_reduce (distributed_c10d.py:2800), called by main (train.py:88); "
        "rank 77 in __getitem__ (data.py:41); rank 99 without a stack; ranks 100 and 101 did not answer"
    )
    many = stacks.groups([w for n in range(9) for w in at((Frame("f", "/x.py", n),), n)])
    assert stacks.in_words(many).endswith("rank 5 in f (x.py:5); 3 elsewhere")


def test_another_line_of_the_same_function_is_the_same_calls():
    inner, *outer = READS
    moved = (Frame(inner.function, inner.file, 99), *outer)
    assert stacks.same_calls(READS, moved)
    assert not stacks.same_calls(READS, READS[1:])
    assert not stacks.same_calls((), ())
    elsewhere = (inner, Frame("__getitem__", "/home/me/data.py", 42), *outer[1:])
    assert not stacks.same_calls(READS, elsewhere)


def test_thousands_of_stacks_take_no_time():
    """A master groups those of all ranks at once; the files on them are the same."""
    layer = Frame("forward", "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py", 1)
    stack = (*[layer] * 49, Frame("main", "/home/me/train.py", 3))
    evidence = [WorkerEvidence(pid=rank, time=0.0, rank=rank, frames=stack) for rank in range(2500)]
    before = time.process_time()
    (group,) = stacks.groups(evidence)
    assert time.process_time() - before < 0.3
    assert group.place == "forward (module.py:1), called by main (train.py:3)"


def test_the_report_has_each_group_and_one_stack_of_it():
    evidence = [
        *at(ALL_REDUCE, 0, 1),
        WorkerEvidence(
            pid=7, time=0, rank=2, frames=READS, text="Thread 7\n", flight_record="/tmp/f2"
        ),
    ]
    text = stacks.report(evidence, [3])
    assert "2 of 4 ranks (0, 1) in all_reduce" in text
    assert "1 of 4 ranks (2) in __getitem__ (data.py:41)\nthe stacks of rank 2 (process 7" in text
    assert "Thread 7" in text
    assert "flight record of rank 2: /tmp/f2" in text
    assert text.endswith("no answer from ranks 3\n")


def inner(event: threading.Event) -> None:
    event.wait(10)


def test_faulthandlers_main_thread_is_found_among_others():
    event = threading.Event()
    thread = threading.Thread(target=inner, args=(event,))
    thread.start()
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode()
    event.set()
    thread.join()
    frames = stacks.main_thread(text)
    assert "inner" in text
    assert frames[0].function == "test_faulthandlers_main_thread_is_found_among_others"
    assert frames[0].file == __file__


PY_SPY = """Process 4242: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 4242 (active+gil): "MainThread"
    Samples.__getitem__ (/home/me/my data (1).py:41)
    <module> (/home/me/train.py:70)
Thread 4300 (active): "pin memory"
    run (/usr/lib/python3.11/threading.py:982)
"""


def test_py_spys_main_thread():
    assert stacks.main_thread(PY_SPY) == (
        Frame("Samples.__getitem__", "/home/me/my data (1).py", 41),
        Frame("<module>", "/home/me/train.py", 70),
    )
    assert (
        len(
            stacks.main_thread(
                PY_SPY.split("Thread 4300", maxsplit=1)[0].replace(': "MainThread"', "")
            )
        )
        == 2
    )
    assert stacks.main_thread("Error: no such process") == ()


@pytest.mark.slow
def test_what_a_real_process_writes_on_the_signal():
    source = "from dlrover.training.worker import stacks; import time; stacks.prepare()\n"
    source += "def wait():\n    print(flush=True) or time.sleep(20)\nwait()\n"
    import asyncio

    from dlrover.agent.workers import evidence

    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            texts = [asyncio.run(evidence._by_signal(process.pid)) for _ in range(2)]
            assert os.path.exists(f"/proc/{process.pid}")
        finally:
            process.kill()
    for text in texts:
        assert [frame.function for frame in stacks.main_thread(text)] == ["wait", "<module>"]


@pytest.mark.slow
def test_a_process_that_did_not_prepare_gets_no_signal():
    import asyncio

    from dlrover.agent.workers import evidence

    with subprocess.Popen(["sleep", "20"]) as process:
        assert asyncio.run(evidence._by_signal(process.pid)) == ""
        assert process.poll() is None
        process.kill()
