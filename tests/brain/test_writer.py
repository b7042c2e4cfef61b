"""The thread that writes goes on whatever becomes of those who asked it."""

import sqlite3
import threading
import time
from concurrent.futures import Future, wait
from typing import Any

import pytest

pytest.importorskip("sqlalchemy")
import sqlalchemy as sa

from dlrover.brain import database as databases, tables, writer as writing
from dlrover.brain.database import open_database
from dlrover.brain.writer import Writer
from dlrover.errors import InfrastructureError


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


def test_a_write_that_raises_something_else_fails_alone(tmp_path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/brain.db")
    writer = Writer(engine)

    def wrong(_batch: object) -> None:
        raise OverflowError("int too large to convert")

    failed, stays = writer.submit(wrong), writer.submit(lambda _: "done")
    with pytest.raises(
        InfrastructureError, match=r"^The database failed: int too large to convert\.$"
    ):
        failed.result(20)
    assert stays.result(20) == "done"
    assert writer.submit(lambda _: "later").result(20) == "later"
    writer.close()
    engine.dispose()


@pytest.mark.slow
def test_a_locked_database_holds_up_all_writes_of_a_commit_once(tmp_path, monkeypatch) -> None:
    """Each may have come to its own wait, so that a Brain with many of them could not even end."""
    monkeypatch.setattr(databases, "LOCK_TIMEOUT", 1)
    monkeypatch.setattr(writing, "LOCK_TIMEOUT", 1)
    engine = open_database(f"sqlite:///{tmp_path}/brain.db")
    writer = Writer(engine)
    other = sqlite3.connect(tmp_path / "brain.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    writes = [writer.submit(lambda _: None) for _ in range(20)]
    for write in writes:
        with pytest.raises(InfrastructureError, match="database is locked"):
            write.result(60)
    assert time.monotonic() - began < 10, "two commits: the first write, and all others together"
    other.execute("ROLLBACK")
    writer.submit(lambda _: None).result(20)
    writer.close()
    engine.dispose()


def test_a_database_that_was_deleted_takes_no_report(tmp_path, caplog) -> None:
    """SQLite would write on to the file without a name, which ends with the Brain."""
    engine = open_database(f"sqlite:///{tmp_path}/brain.db")
    writer = Writer(engine)
    assert writer.submit(lambda _: "done").result(20) == "done"
    for file in tmp_path.glob("brain.db*"):
        file.unlink()
    for _ in range(3):
        with pytest.raises(InfrastructureError, match=r"brain.db was deleted or replaced; start"):
            writer.submit(lambda _: "lost").result(20)
    assert not (tmp_path / "brain.db").exists()
    writer.close()
    engine.dispose()
    assert caplog.text.count("A commit of 1 writes failed") == 1


READ_ONLY = {
    "mysql": "SET SESSION TRANSACTION READ ONLY",
    "postgresql": "SET SESSION CHARACTERISTICS AS TRANSACTION READ ONLY",
}


QUOTAS = tables.quotas.update().values(limits="{}")


def test_a_server_that_has_become_read_only_is_left(database: str) -> None:
    """After a failover, its address leads new connections to the server in charge, and old ones stay."""
    engine = open_database(database)
    writer, kind = Writer(engine), engine.url.get_backend_name()

    def write(batch: writing.Batch) -> str:
        batch.note(f"r{time.monotonic_ns()}", time.time())
        return "done"

    try:
        assert writer.submit(write).result(20) == "done"
        if kind in READ_ONLY:
            with engine.connect() as connection:
                connection.exec_driver_sql(READ_ONLY[kind])
                connection.commit()
        assert writer.submit(write).result(20) == "done"
    finally:
        writer.close()
        engine.dispose()


def test_servers_that_write_the_same_in_different_orders_do_not_deadlock(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    engines = [open_database(database) for _ in range(2)]
    writers = [Writer(engine) for engine in engines]
    begun = [threading.Event(), threading.Event()]

    def write(batch: writing.Batch, own: int) -> None:
        for queue in ("ab", "ba")[own]:
            batch.connection.execute(QUOTAS.where(tables.quotas.c.queue == queue))
            begun[own].set()
            begun[1 - own].wait(0.3)  # the other one cannot begin

    try:
        rows = [{"queue": queue, "limits": ""} for queue in "ab"]
        writers[0].submit(lambda batch: batch.insert(tables.quotas, *rows)).result(20)
        both = [w.submit(lambda batch, n=n: write(batch, n)) for n, w in enumerate(writers)]
        for done in both:
            done.result(20)
    finally:
        for writer, engine in zip(writers, engines, strict=True):
            writer.close()
            engine.dispose()
    assert not caplog.messages


@pytest.mark.parametrize("database", ["mariadb", "postgresql"], indirect=True)
def test_a_server_that_stands_still_in_a_transaction_does_not_hold_the_others(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, all others waited until the end of its connection, which takes hours if its machine is lost."""
    monkeypatch.setattr(databases, "LOCK_TIMEOUT", 2)
    engines = [open_database(database) for _ in range(2)]
    writers = [Writer(engine) for engine in engines]
    begun, go_on = threading.Event(), threading.Event()

    def stands_still(_batch: object) -> str:
        begun.set()
        go_on.wait(20)
        return "done"

    try:
        still = writers[0].submit(stands_still)
        assert begun.wait(20)
        assert writers[1].submit(lambda _: "done").result(15) == "done"
        go_on.set()
        assert still.result(20) == "done"
    finally:
        go_on.set()
        for writer, engine in zip(writers, engines, strict=True):
            writer.close()
            engine.dispose()


@pytest.mark.parametrize("database", ["mariadb", "postgresql"], indirect=True)
def test_a_server_that_migrates_and_one_that_writes_do_not_deadlock(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_database(database)
    with engine.begin() as connection:
        tables.ends.drop(connection)
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0001'")
    writer = Writer(engine)
    writes: list[Future[Any]] = []

    @sa.event.listens_for(sa.Engine, "after_cursor_execute")
    def migrating(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "CREATE TABLE ends" in statement:
            change = tables.jobs.update().values(done=1.0)
            writes.append(writer.submit(lambda batch: batch.connection.execute(change) and None))
            wait(writes, 0.5)  # in PostgreSQL it has to wait for the migration

    try:
        open_database(database).dispose()
        writes[0].result(20)
    finally:
        sa.event.remove(sa.Engine, "after_cursor_execute", migrating)
        writer.close()
        engine.dispose()
    assert not caplog.messages


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_a_pooler_may_give_each_transaction_another_connection(database: str) -> None:
    """As PgBouncer does: a prepared statement there may be another one of the same name."""
    engine = open_database(database)
    try:
        with engine.connect() as connection:
            for _ in range(20):
                connection.execute(sa.select(tables.jobs.c.id)).all()
            prepared = connection.scalar(sa.text("SELECT count(*) FROM pg_prepared_statements"))
        assert prepared == 0
    finally:
        engine.dispose()
