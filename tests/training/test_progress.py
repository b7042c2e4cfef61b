"""The progress board: whatever moment it is read at, the times by activity add up to the worker's age."""

import contextlib
import os
import threading
import time

import pytest
from hypothesis import given, strategies as st

from dlrover.agent.workers.zygotes import make_board
from dlrover.spec.activity import Activity
from dlrover.spec.measurements import Batches
from dlrover.training.worker.progress import BOARD_BYTES, MAX_SLOTS, Board
from dlrover.training.worker.tracker import Tracker, activity, guarded


@pytest.fixture
def board():
    fd = make_board()
    try:
        yield Board(fd)
    finally:
        os.close(fd)


def test_slots_are_their_workers_own(board):
    assert BOARD_BYTES % os.sysconf("SC_PAGE_SIZE") == 0
    for slot in range(MAX_SLOTS):
        board.begin(slot, 1000 + slot)
        for _ in range(slot % 3):
            board.count_step(slot)
        board.set_first_step(slot, slot)
    for slot in range(MAX_SLOTS):
        seen = board.activity(slot, 2_000_000_000 + slot)
        assert (seen.steps, seen.first_step) == (slot % 3, slot)
        assert seen.seconds[Activity.START] == pytest.approx(2.0, abs=1e-5)


def test_a_worker_reads_one_shard_at_a_time(board):
    assert board.reading(3) is None
    board.set_reading(3, 7, 0, 50)
    board.set_reading(3, 2**32, 1, 2**62)
    assert board.reading(3) == (2**32, 1, 2**62)
    assert board.reading(2) is board.reading(4) is None


def test_a_worker_records_that_its_program_has_ended(board):
    assert not board.finished(3)
    board.mark_finished(3)
    assert [slot for slot in range(MAX_SLOTS) if board.finished(slot)] == [3]
    board.clear(3)
    assert not board.finished(3)
    board.mark_failed(3)
    assert [slot for slot in range(MAX_SLOTS) if board.failed(slot)] == [3]
    assert not board.finished(3)


def test_a_worker_tells_which_batches_it_allows_and_how_noisy_its_gradients_are(board):
    board.begin(3, 1)
    assert board.activity(3, 2).batches is None
    board.set_batches(3, 96, 768, 32)
    board.set_noise(3, 1.5e-9, 2.25e12)
    assert board.activity(3, 2).batches == Batches(
        least=96, most=768, pass_most=32, square=1.5e-9, variance=2.25e12
    )
    board.begin(4, 1)
    assert board.activity(4, 2).batches is None


def test_a_program_that_is_not_watched_has_no_activity(board):
    assert board.activity(0, time.monotonic_ns()) is None
    board.begin(0, 1)
    board.forget(0)
    assert board.activity(0, time.monotonic_ns()) is None


@given(
    changes=st.lists(
        st.tuples(st.sampled_from(list(Activity)), st.integers(0, 10**12)), max_size=20
    ),
    rest=st.integers(0, 10**12),
)
def test_the_seconds_add_up_to_the_age(changes, rest):
    fd = make_board()
    board = Board(fd)
    born = now = 10**15
    board.begin(0, born)
    doing, since, totals = Activity.START, born, dict.fromkeys(Activity, 0)
    for activity_, duration in changes:
        now += duration
        totals[doing] += now - since
        board.change(0, doing, totals[doing], activity_, now)
        doing, since = activity_, now
    seen = board.activity(0, now + rest)
    os.close(fd)
    assert sum(seen.seconds) == pytest.approx((now + rest - born) / 1e9)
    assert seen.doing == doing
    assert seen.since == pytest.approx((now + rest - since) / 1e9)


def test_a_reader_between_two_writes_sees_no_nonsense(board):
    """The total of what ends is written before what begins."""
    second = 10**9
    board.begin(0, second)
    board._words[6 + Activity.START] = 3 * second  # the first half of a change at 4 s
    seen = board.activity(0, 4 * second)
    assert seen.doing == Activity.START
    assert seen.seconds == (3, 0, 0, 0, 0, 0)


def test_a_reader_beside_a_busy_writer(board):
    """Read as fast as possible while another thread changes as fast as possible."""
    tracker = Tracker(board, 0)
    began = time.monotonic_ns()
    stop = threading.Event()
    problems = []

    def read():
        while not stop.is_set():
            now = time.monotonic_ns()
            seen = board.activity(0, now)
            least, most = (now - began) / 1e9, (time.monotonic_ns() - began) / 1e9
            if not least - 0.01 <= sum(seen.seconds) <= most + 0.01:
                problems.append(seen)

    reader = threading.Thread(target=read)
    reader.start()
    until = time.monotonic() + 0.15
    tracker.step(time.monotonic_ns())
    while time.monotonic() < until:
        tracker.end(tracker.begin(Activity.DATA))
        tracker.step(time.monotonic_ns())
    stop.set()
    reader.join()
    assert not problems


def test_what_shows_within_what(board):
    tracker = Tracker(board, 0)

    def shown(*kinds):
        """The activity shown within nested ones."""
        with contextlib.ExitStack() as stack:
            for kind in kinds:
                stack.callback(tracker.end, tracker.begin(kind))
            return board.activity(0, time.monotonic_ns()).doing

    assert shown() == shown(Activity.DATA) == shown(Activity.EVAL) == Activity.START
    assert shown(Activity.COMPILE) == Activity.COMPILE
    tracker.step(time.monotonic_ns())
    assert shown() == Activity.STEP
    assert shown(Activity.EVAL, Activity.DATA) == Activity.EVAL
    assert shown(Activity.EVAL, Activity.CHECKPOINT) == Activity.CHECKPOINT
    assert shown(Activity.CHECKPOINT, Activity.CHECKPOINT) == Activity.CHECKPOINT
    assert shown() == Activity.STEP


def test_the_tracker_keeps_the_time_of_each_activity(board):
    tracker = Tracker(board, 0)
    tracker.step(time.monotonic_ns())
    for kind in (Activity.DATA, Activity.CHECKPOINT):
        before = tracker.begin(kind)
        time.sleep(0.02)
        tracker.end(before)
    seconds = board.activity(0, time.monotonic_ns()).seconds
    assert 0.02 <= seconds[Activity.DATA] < 10
    assert 0.02 <= seconds[Activity.CHECKPOINT] < 10
    assert seconds[Activity.EVAL] == 0


def test_telling_an_activity_that_there_is_not():
    expected = "activity is 'lunch'; it must be one of data, compile"
    with pytest.raises(ValueError, match=expected), activity("lunch"):
        pass


def test_telling_an_activity_outside_of_a_job():
    with activity("eval"):
        pass


def test_a_hook_that_fails_is_not_called_again(capsys):
    calls = []

    def hook():
        calls.append(1)
        raise ZeroDivisionError("zero")

    lost = []
    safe = guarded(hook, lambda: lost.append(1))
    safe()
    safe()
    assert (calls, lost) == ([1], [1])
    assert capsys.readouterr().err.count("turned off: ZeroDivisionError: zero\n") == 1
