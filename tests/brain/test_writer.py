"""The thread that writes goes on whatever becomes of those who asked it."""

import threading

import pytest

pytest.importorskip("sqlalchemy")
from dlrover.brain.database import open_database
from dlrover.brain.writer import Writer


def test_a_write_whose_caller_has_left_is_dropped(tmp_path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/brain.db")
    writer = Writer(engine)
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def first(_batch: object) -> None:
        begun.set()
        go_on.wait(20)

    running = writer.submit(first)
    assert begun.wait(20)
    left, stays = (writer.submit(lambda _, n=n: done.append(n)) for n in ("left", "stays"))
    assert left.cancel()
    assert not running.cancel(), "what has begun is carried out"
    go_on.set()
    stays.result(20)
    running.result(20)
    writer.close()
    engine.dispose()
    assert done == ["stays"]
