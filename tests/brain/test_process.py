"""The Brain as a process: killed and started again, started twice at once, and away."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from dlrover.brain import database as databases, tables
from dlrover.brain.database import open_database
from dlrover.errors import DLRoverError, InfrastructureError
from dlrover.rpc import brain as rpc
from dlrover.rpc.brain import BrainClient, BrainLink
from dlrover.spec import brain
from tests.brain import jobs, processes
from tests.brain.processes import TOKEN
from tests.services import free_port

WRITERS = 8
KILLS = 2
SINCE = time.time() - 86_400


def samples_of(url: str, job: str) -> list[int]:
    engine = open_database(url)
    with engine.connect() as connection:
        rows = connection.execute(
            sa.select(tables.samples.c.at).where(tables.samples.c.job == job)
        ).all()
    engine.dispose()
    return [round(row.at - SINCE) for row in rows]


async def write(client: BrainClient, numbers: list[int], acknowledged: list[int]) -> None:
    """Report until cancelled; what failed is sent again under the same request."""
    while True:
        number = len(numbers) + 1
        numbers.append(number)
        sample = brain.Sample(shape=jobs.shape(1), throughput=1.0, at=SINCE + number)
        report = brain.ReportSamples(request=rpc.request_id(), job="one", samples=(sample,))
        while not await is_acknowledged(client, report):
            await asyncio.sleep(0.02)
        acknowledged.append(number)


async def is_acknowledged(client: BrainClient, report: brain.Report) -> bool:
    try:
        await client.report(report)
    except InfrastructureError:
        return False
    return True


async def test_a_killed_brain_loses_nothing_that_it_acknowledged(database: str) -> None:
    numbers: list[int] = []
    acknowledged: list[int] = []
    port = free_port()
    client = BrainClient(f"127.0.0.1:{port}", TOKEN, timeout=2.0)
    writers: list[asyncio.Task[None]] = []
    async with client:
        for number in range(KILLS):
            with processes.brain(database, port) as running:
                if not number:
                    await client.report(jobs.register("one"))
                    writers = [
                        asyncio.create_task(write(client, numbers, acknowledged))
                        for _ in range(WRITERS)
                    ]
                reached = len(acknowledged) + 100
                while len(acknowledged) < reached:
                    await asyncio.sleep(0.01)
                running.process.send_signal(signal.SIGKILL)
                running.process.wait()
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
    kept = samples_of(database, "one")
    assert set(acknowledged) <= set(kept)
    assert len(kept) == len(set(kept))
    assert len(acknowledged) >= KILLS * 100


def test_several_brains_may_open_a_new_database_at_once(database: str) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for engine in pool.map(open_database, [database] * 4):
            with engine.connect() as connection:
                assert connection.scalar(sa.select(sa.func.count()).select_from(tables.jobs)) == 0
            engine.dispose()


def test_the_wait_for_another_server_that_migrates_ends(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_database(database)
    monkeypatch.setattr(databases, "LOCK_TIMEOUT", 1)
    with (
        databases._alone(engine),
        pytest.raises(InfrastructureError, match="Another server has been migrating the database"),
    ):
        open_database(database)
    engine.dispose()
    open_database(database).dispose()


def test_migrations_make_the_tables_of_the_code(database: str) -> None:
    open_database(database).dispose()
    engine = open_database(database)
    with engine.connect() as connection:
        options = {
            "compare_type": not database.startswith("mysql")
        }  # it tells MEDIUMTEXT from itself
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, tables.metadata) == []
    engine.dispose()


def cut_off(_connection, _cursor, statement: str, *_: object) -> None:
    """Lose the connection behind a statement that MariaDB commits by itself."""
    if statement.split(maxsplit=1)[0] == "CREATE":
        raise sa.exc.OperationalError(statement, {}, Exception("cut off"))


@pytest.mark.slow
def test_a_migration_that_was_cut_off_is_done_again(servers) -> None:
    database = servers("mariadb").create("cut_off")
    sa.event.listen(sa.Engine, "after_cursor_execute", cut_off)
    try:
        for _ in range(100):
            with contextlib.suppress(InfrastructureError):
                open_database(database).dispose()
                break
    finally:
        sa.event.remove(sa.Engine, "after_cursor_execute", cut_off)
    engine = open_database(database)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": False})
        assert compare_metadata(context, tables.metadata) == []
    engine.dispose()


@pytest.mark.slow
def test_a_table_of_another_program_is_left_alone(servers) -> None:
    database = servers("mariadb").create("anothers")
    engine = sa.create_engine(database)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE jobs (id INT)"))
    engine.dispose()
    with pytest.raises(InfrastructureError, match="'jobs' already exists"):
        open_database(database)


def test_a_database_of_a_newer_version_is_refused(database: str) -> None:
    engine = open_database(database)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(InfrastructureError, match="another version"):
        open_database(database)


@pytest.mark.slow
async def test_a_job_goes_on_without_the_brain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "RETRY", (0.05, 0.05))
    url = f"sqlite:///{tmp_path}/brain.db"
    port = free_port()
    async with BrainClient(f"127.0.0.1:{port}", TOKEN, timeout=2.0) as client:
        link = BrainLink(client, "one", jobs.register("one").description)
        task = asyncio.create_task(link.run())
        link.report(jobs.samples("one", jobs.shape(1)))
        assert await link.plan(jobs.shape(1)) is None
        assert "cannot be reached" in link.away
        with processes.brain(url, port):
            await until(lambda: not link._reports)
            advice = await link.plan(jobs.shape(1))
            assert advice is not None
            assert advice.plan is not None
        for file in tmp_path.glob("brain.db*"):
            file.unlink()
        with processes.brain(url, port):  # it knows nothing any more
            link.report(jobs.samples("one", jobs.shape(2)))
            await until(lambda: not link._reports)
            assert not link.away
            (row,) = await client.jobs()
        assert (row.job, row.samples, link.dropped) == ("one", 1, 0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(true: Callable[[], bool]) -> None:
    async def wait() -> None:
        await asyncio.sleep(0.05)
        while not true():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 15)


async def test_reports_beyond_the_limit_are_dropped_the_oldest_first() -> None:
    async with BrainClient("127.0.0.1:1", TOKEN) as client:
        link = BrainLink(client, "one", jobs.register("one").description)
        reports = [jobs.samples("one", jobs.shape(1)) for _ in range(rpc.KEPT_REPORTS + 4)]
        for report in reports:
            link.report(report)
        assert link.dropped == 5
        kept = list(link._reports)
        assert isinstance(kept[0], brain.RegisterJob)
        assert kept[1:] == reports[5:]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "not the URL of a database"),
        ("oracle://a@b/c", "accepted are sqlite"),
        ("sqlite://", "names no file"),
        ("mysql://root:hidden@127.0.0.1:1/brain", "cannot be opened"),
        ("mysql://root@127.0.0.1:1/brain?password=hidden", "cannot be opened"),
        ("mysql://root:p@ss:hidden@127.0.0.1:1/brain", "not the URL of a database"),
        ("sqlite:////proc/brain/x.db", "cannot be opened"),
    ],
)
def test_wrong_databases_are_refused(url: str, said: str) -> None:
    with pytest.raises(DLRoverError, match=said) as raised:
        open_database(url)
    assert "hidden" not in str(raised.value)
