"""The Brain through its clients, on each kind of database."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from dlrover.brain import tables
from dlrover.brain.database import open_database
from dlrover.errors import ConfigurationError, InfrastructureError, ProtocolError
from dlrover.rpc.brain import BrainClient, request_id
from dlrover.spec import brain
from dlrover.spec.plan import Effect, NodeGroup, ResourcePlan
from tests.brain import jobs
from tests.brain.conftest import Serve

DAY = 86_400.0


def count(url: str, table: sa.Table) -> int:
    engine = open_database(url)
    with engine.connect() as connection:
        found = connection.scalar(sa.select(sa.func.count()).select_from(table))
    engine.dispose()
    return int(found or 0)


async def test_a_job_is_planned_by_what_it_measured(database: str, serve: Serve) -> None:
    async with serve(database) as client:
        await client.report(jobs.register("one"))
        now = jobs.shape(1)
        for _ in range(4):
            await client.report(jobs.samples("one", now))
            advice = await client.plan("one", now)
            assert advice.plan is not None
            if "no measurement rules out" in advice.reason:
                break
            following = jobs.shape(advice.plan.groups["worker"].count)
            assert jobs.throughput(following) > jobs.throughput(now)
            now = following
            await client.report(jobs.outcome("one", advice.plan_id, jobs.throughput(now)))
        assert now.groups["worker"].count == 16
        story = await client.explain("one")
    assert [r.state for r in story.plans] == ["applied"] * (len(story.plans) - 1) + [None]
    first = story.plans[0]
    assert first.plan.effect is not None
    assert first.error == pytest.approx(first.measured / first.plan.effect.throughput - 1)
    assert first.before == jobs.shape(1)
    assert story.job.shape == now
    assert len(story.samples) == len(story.plans)


async def test_the_same_question_has_the_same_answer(database: str, serve: Serve) -> None:
    async with serve(database) as client:
        await client.report(jobs.register("one"))
        await client.report(jobs.samples("one", jobs.shape(1)))
        asked = request_id()
        first = await client.plan("one", jobs.shape(1), asked)
        assert first.plan is not None
        await client.report(jobs.samples("one", jobs.shape(1), jobs.shape(2), jobs.shape(4)))
        assert await client.plan("one", jobs.shape(1), asked) == first
        assert await client.plan("one", jobs.shape(1)) != first
    assert count(database, tables.plans) == 2


async def test_a_report_counts_once(database: str, serve: Serve) -> None:
    report = jobs.samples("one", jobs.shape(1))
    async with serve(database) as client, serve(database) as other:
        await client.report(jobs.register("one"))
        sent = [one.report(report) for one in (client, other) for _ in range(10)]
        await asyncio.gather(*sent)
        again = [jobs.samples("one", jobs.shape(2)) for _ in range(50)]
        await asyncio.gather(*(one.report(r) for one in (client, other) for r in again))
    assert count(database, tables.samples) == 51


async def test_what_is_refused_undoes_nothing_else(database: str, serve: Serve) -> None:
    async with serve(database) as client:
        await client.report(jobs.register("one"))
        reports: list[brain.Report] = []
        for _ in range(20):
            reports += [jobs.samples("one", jobs.shape(1)), jobs.samples("none", jobs.shape(1))]
        found = await asyncio.gather(*map(client.report, reports), return_exceptions=True)
    refused = [error for error in found if error is not None]
    assert len(refused) == 20
    assert all(isinstance(error, ConfigurationError) for error in refused)
    assert "knows no job none" in str(refused[0])
    assert count(database, tables.samples) == 20


def cores(number: float) -> brain.Shape:
    return brain.Shape(groups={"worker": NodeGroup(count=1, cpu=number)})


def planned(throughput: float) -> brain.ReportPlan:
    effect = Effect(throughput=throughput, low=0.0, high=1.0)
    plan = ResourcePlan(groups={"worker": NodeGroup(count=2)}, reason="more", effect=effect)
    return brain.ReportPlan(request=request_id(), job="one", plan_id="plan", plan=plan)


@pytest.mark.parametrize(
    "wrong",
    [
        jobs.samples("one", brain.Shape(groups={}), throughput=1.0),
        jobs.samples("one", brain.Shape(groups={"worker": NodeGroup(count=0)}), throughput=1.0),
        jobs.samples("one", jobs.shape(1), throughput=float("nan")),
        jobs.samples("one", cores(float("nan")), throughput=1.0),
        jobs.samples("one", cores(-1.0), throughput=1.0),
        jobs.register("one", features={"batch": float("inf")}),
        jobs.outcome("one", "no-such-plan", 1.0),
        planned(0.0),
        planned(5e-324),
        jobs.register("one", space=brain.Space(workers=brain.Range(3, 3, 2))),
        msgspec.structs.replace(jobs.samples("one", jobs.shape(1)), job="a b"),
    ],
    ids=[
        "no group",
        "no worker",
        "nan",
        "cores that are no number",
        "fewer cores than none",
        "endless feature",
        "no plan",
        "no speed to compare with",
        "a speed that compares to infinity",
        "empty range",
        "name",
    ],
)
async def test_wrong_reports_are_refused(
    tmp_path: object, serve: Serve, wrong: brain.Report
) -> None:
    async with serve(f"sqlite:///{tmp_path}/brain.db") as client:
        await client.report(jobs.register("one"))
        with pytest.raises(ProtocolError):
            await client.report(wrong)
        assert [row.job for row in await client.jobs()] == ["one"]


async def test_a_text_with_a_nul_is_kept_without_it(database: str, serve: Serve) -> None:
    """PostgreSQL takes none: the report would come again and again, and all later ones wait behind it."""
    async with serve(database) as client:
        await client.report(jobs.register("one"))
        await client.report(jobs.end("one", reason="embedded \0 character"))
        (row,) = await client.jobs()
    assert (row.state, row.reason) == ("succeeded", "embedded \ufffd character")


async def test_a_new_job_starts_like_similar_ones(database: str, serve: Serve) -> None:
    features: dict[str, str | float] = {"model": "bert", "user": "eva", "batch": 256}
    async with serve(database) as client:
        await client.report(jobs.register("past", features=features))
        await client.report(jobs.samples("past", jobs.shape(8), done=1e6))
        used = brain.Usage(node="worker-0", cpu=3.0, memory=7 << 30, progress=1.0)
        await client.report(brain.ReportUsage(request=request_id(), job="past", nodes=(used,)))
        await client.report(jobs.register("new", features=features))
        fresh = await client.plan("new", None)
        await client.report(jobs.end("past"))
        advice = await client.plan("new", None)
    assert fresh.plan is not None
    assert fresh.plan.groups["worker"].count == 1
    assert "starts with its minimum" in fresh.reason
    assert advice.plan is not None
    assert advice.plan.groups["worker"].count == 8
    assert advice.plan.groups["worker"].memory == 7 << 30
    assert "similar past job" in advice.reason


async def test_a_job_hears_what_the_most_similar_job_has_measured(
    database: str, serve: Serve
) -> None:
    features: dict[str, str | float] = {"model": "bert", "user": "eva", "batch": 256}
    async with serve(database) as client:
        for name, batch, sizes in (
            ("far", 64.0, (1, 2)),
            ("near", 250.0, (1, 2, 4)),
            ("one", 256.0, (2,)),
        ):
            await client.report(jobs.register(name, features={**features, "batch": batch}))
            await client.report(jobs.samples(name, *map(jobs.shape, sizes)))
        await client.report(jobs.register("servers", features=features, strategy="ps"))
        sizes_with_servers = [jobs.shape(n, servers=1) for n in (1, 2)]
        await client.report(jobs.samples("servers", *sizes_with_servers))
        await client.report(jobs.register("new", features=features))
        nobody = await client.similar("new")
        for name in ("far", "near", "one", "servers"):
            await client.report(jobs.end(name))
        found = await client.similar("new")
        await client.report(jobs.register("other", features={"model": "gpt", "user": "max"}))
        other = await client.similar("other")
        with pytest.raises(ConfigurationError, match="knows no job gone"):
            await client.similar("gone")
    assert nobody == other == brain.Similar()
    # That of one size is nearer, but says less.
    assert (found.name, len(found.samples)) == ("near", 3)
    assert found.similarity == pytest.approx((2 + 250 / 256) / 3)
    assert [s.throughput for s in found.samples] == [
        pytest.approx(jobs.throughput(jobs.shape(n))) for n in (1, 2, 4)
    ]


async def test_nodes_keep_their_latest_and_their_most(database: str, serve: Serve) -> None:
    async with serve(database) as client:
        await client.report(jobs.register("one"))
        for memory, cpu in ((5.0, 1.0), (9.0, 3.0), (6.0, 2.0)):
            used = brain.Usage(node="worker-0", cpu=cpu, memory=memory)
            await client.report(brain.ReportUsage(request=request_id(), job="one", nodes=(used,)))
        (node,) = (await client.explain("one")).nodes
    assert (node.memory, node.most_memory, node.cpu, node.most_cpu) == (6.0, 9.0, 2.0, 3.0)
    assert count(database, tables.usages) == 3


async def test_the_usage_of_thousands_of_nodes_takes_few_statements(
    database: str, serve: Serve
) -> None:
    """Before, each node took a statement, and all other reports waited."""
    statements: list[str] = []

    @sa.event.listens_for(sa.Engine, "before_cursor_execute")
    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    try:
        async with serve(database) as client:
            await client.report(jobs.register("job"))
            for most in (9.0, 5.0):
                del statements[:]
                many = tuple(
                    brain.Usage(node=str(n), kind="worker", cpu=most, memory=n) for n in range(300)
                )
                await client.report(
                    brain.ReportUsage(request=request_id(), job="job", nodes=(*many, many[7]))
                )
                assert len(statements) < 12
            found = (await client.explain("job")).nodes
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)
    assert len(found) == 300
    assert {(one.cpu, one.most_cpu) for one in found} == {(5.0, 9.0)}


async def test_the_cluster_is_divided_within_quotas(database: str, serve: Serve) -> None:
    async with serve(database) as client:
        await client.report(jobs.machines(4))
        await client.report(
            brain.SetQuota(request=request_id(), queue="small", limits={"accelerator": 3})
        )
        for name, queue in (("a", "small"), ("b", "small"), ("c", "")):
            await client.report(jobs.register(name, mode="cluster", queue=queue, total=1e7))
            await client.report(jobs.samples(name, jobs.shape(1), jobs.shape(2), jobs.shape(4)))
        division = await client.divide()
        cluster = await client.cluster()
        advice = {name: await client.plan(name, jobs.shape(4)) for name in "abc"}
        shapes = {
            name: brain.Shape(groups=one.plan.groups, batch=64)
            for name, one in advice.items()
            if one.plan
        }
        again = [await client.plan(name, shape) for name, shape in shapes.items()]
    assert cluster.capacity == {"accelerator": 16, "cpu": 256}
    wanted = {
        name: (one.plan.groups["worker"].count if one.plan else 4) for name, one in advice.items()
    }
    assert wanted["a"] + wanted["b"] <= 3
    assert sum(wanted.values()) <= 16
    assert wanted["c"] > 4
    assert set(division.advice) == {"a", "b", "c"}
    assert all("has what it was given" in one.reason for one in again)


async def test_a_job_that_ended_unheard_gets_no_part_of_the_cluster(
    database: str, serve: Serve
) -> None:
    clock = [0.0]
    async with serve(database, lambda: clock[0]) as client:
        await client.report(jobs.machines(2))
        for name in ("gone", "here"):
            await client.report(jobs.register(name, mode="cluster", total=1e7))
            await client.report(jobs.samples(name, jobs.shape(1), jobs.shape(2), jobs.shape(4)))
        beside = await client.plan("here", jobs.shape(4))
        clock[0] += 2 * 3600.0
        await client.report(jobs.samples("here", jobs.shape(4)))
        alone = await client.plan("here", jobs.shape(4))
        assert set((await client.divide()).advice) == {"here"}
        await client.plan("gone", jobs.shape(4))
        clock[0] -= 3600.0
        assert set((await client.divide()).advice) == {"gone", "here"}, "a clock was set back"
    sizes = [one.plan.groups["worker"].count if one.plan else 4 for one in (beside, alone)]
    assert sizes[0] < sizes[1]


async def test_a_division_is_made_anew_when_the_clock_was_set_back(
    database: str, serve: Serve
) -> None:
    clock = [1e6]
    async with serve(database, lambda: clock[0]) as client:
        await client.report(jobs.machines(1, accelerators=2))
        await client.report(jobs.register("one", mode="cluster", total=1e7))
        await client.report(jobs.samples("one", jobs.shape(1), jobs.shape(2)))
        assert (await client.plan("one", jobs.shape(2))).plan is None
        await client.report(jobs.machines(4))
        clock[0] -= 7200.0
        advice = await client.plan("one", jobs.shape(2))
    assert advice.plan is not None
    assert advice.plan.groups["worker"].count == 4


async def test_a_manual_job_stays_as_it_is(database: str, serve: Serve) -> None:
    async with serve(database) as client:
        await client.report(jobs.register("one", mode="manual"))
        await client.report(jobs.samples("one", jobs.shape(1)))
        advice = await client.plan("one", jobs.shape(1))
    assert advice.plan is None
    assert "manual" in advice.reason
    assert count(database, tables.plans) == 0


async def test_what_if_changes_nothing(database: str, serve: Serve) -> None:
    async with serve(database) as client:
        await client.report(jobs.register("one"))
        with pytest.raises(ConfigurationError, match="No throughput"):
            await client.effect("one", 8)
        await client.report(jobs.samples("one", *(jobs.shape(n) for n in (1, 2, 4))))
        near, far = await client.effect("one", 8), await client.effect("one", 16)
    assert near.inside
    assert not far.inside
    assert near.plan.effect is not None
    assert near.plan.effect.throughput == pytest.approx(jobs.throughput(jobs.shape(8)), rel=0.3)
    assert count(database, tables.plans) == 0


async def test_the_plans_of_a_master_are_kept_too(database: str, serve: Serve) -> None:
    plan = ResourcePlan(
        groups={"worker": NodeGroup(count=2)},
        reason="für 'quotes' und 数",
        effect=Effect(throughput=10, low=8, high=12),
    )
    async with serve(database) as client:
        await client.report(jobs.register("one"))
        await client.report(
            brain.ReportPlan(request=request_id(), job="one", plan_id="p1", plan=plan)
        )
        await client.report(jobs.outcome("one", "p1", 9.0))
        with pytest.raises(ProtocolError):
            await client.report(
                brain.ReportPlan(request=request_id(), job="one", plan_id="p1", plan=plan)
            )
        (record,) = (await client.explain("one")).plans
    assert record.plan == plan
    assert (record.optimizer, record.within) == ("master", True)
    assert record.error == pytest.approx(-0.1)


async def test_ids_that_differ_in_case_are_different(database: str, serve: Serve) -> None:
    async with serve(database) as client:
        await client.report(jobs.register("Job"))
        await client.report(jobs.register("job"))
        assert {row.job for row in await client.jobs()} == {"Job", "job"}


async def test_old_records_are_forgotten(database: str, serve: Serve) -> None:
    time = [0.0]
    async with serve(database, lambda: time[0]) as client:
        await client.report(jobs.register("gone"))
        await client.report(jobs.samples("gone", jobs.shape(1)))
        advice = await client.plan("gone", jobs.shape(1))
        await client.report(jobs.outcome("gone", advice.plan_id, 1.0))
        await client.report(jobs.end("gone"))
        await client.report(jobs.register("runs"))
        await client.report(jobs.samples("runs", jobs.shape(1)))
        time[0] = 89 * DAY
        await client.report(jobs.samples("runs", jobs.shape(2)))
        engine = open_database(database)
        assert prune_all(engine, time[0]) == 6  # the requests
        time[0] = 91 * DAY
        assert prune_all(engine, time[0]) > 0
        engine.dispose()
        assert [row.job for row in await client.jobs()] == ["runs"]
        (left,) = (await client.explain("runs")).samples
    assert left.at == 89 * DAY
    assert count(database, tables.plans) == count(database, tables.outcomes) == 0


async def test_a_job_that_ended_unheard_is_forgotten(database: str, serve: Serve) -> None:
    time = [1.0]
    async with serve(database, lambda: time[0]) as client:
        for name in ("gone", "silent", "samples", "usage"):
            await client.report(jobs.register(name))
        await client.report(jobs.samples("gone", jobs.shape(1)))
        await client.plan("gone", jobs.shape(1))
        time[0] = 30 * DAY
        await client.report(jobs.register("new"))
        await client.report(jobs.samples("samples", jobs.shape(1)))
        used = brain.ReportUsage(
            request=request_id(), job="usage", nodes=(brain.Usage(node="worker-0"),)
        )
        await client.report(used)
        time[0] = 100 * DAY
        engine = open_database(database)
        prune_all(engine, time[0])
        engine.dispose()
        assert {row.job for row in await client.jobs()} == {"samples", "usage", "new"}
        with pytest.raises(ConfigurationError, match="knows no job gone"):
            await client.report(jobs.samples("gone", jobs.shape(1)))
        await client.report(jobs.register("gone"))
        await client.report(jobs.samples("gone", jobs.shape(1)))


async def test_measurements_from_the_future_are_those_of_now(database: str, serve: Serve) -> None:
    async with serve(database, lambda: 5 * DAY) as client:
        await client.report(jobs.register("one"))
        for at in (0.0, 4 * DAY, 6 * DAY, 1e18):
            sample = brain.Sample(shape=jobs.shape(1), throughput=1.0, at=at)
            report = brain.ReportSamples(request=request_id(), job="one", samples=(sample,))
            await client.report(report)
        node = brain.Usage(node="worker-0", at=1e18)
        await client.report(brain.ReportUsage(request=request_id(), job="one", nodes=(node,)))
        found = await client.explain("one")
    assert [sample.at / DAY for sample in found.samples] == [5, 4, 5, 5]
    assert found.nodes[0].heard == 5 * DAY


def prune_all(engine: sa.Engine, now: float) -> int:
    from dlrover.brain.database import prune

    deleted = 0
    while True:
        with engine.begin() as connection:
            some = prune(connection, now, 90.0)
        if not some:
            return deleted
        deleted += some


async def test_a_list_of_jobs_has_the_latest_first(database: str, serve: Serve) -> None:
    time = [0.0]
    async with serve(database, lambda: time[0]) as client:
        for name in ("a", "b", "c"):
            time[0] += 1
            await client.report(jobs.register(name))
        await client.report(jobs.end("b", reason="done", state="failed"))
        assert [row.job for row in await client.jobs()] == ["c", "b", "a"]
        assert [row.job for row in await client.jobs(2)] == ["c", "b"]
        assert [row.job for row in await client.jobs(running=True)] == ["c", "a"]
        await client.report(jobs.register("b"))
        assert len(await client.jobs(running=True)) == 3


async def test_a_wrong_token_is_refused(tmp_path: object, serve: Serve) -> None:
    async with (
        serve(f"sqlite:///{tmp_path}/brain.db") as client,
        BrainClient(client.address, "another") as other,
    ):
        with pytest.raises(ConfigurationError, match="Brain"):
            await other.jobs()


@pytest.mark.parametrize("database", ["mariadb", "postgresql"], indirect=True)
async def test_a_lost_connection_to_the_database_is_made_again(database: str, serve: Serve) -> None:
    kill = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid()"
    )
    async with serve(database) as client:
        await client.report(jobs.register("one"))
        await client.jobs()
        engine = open_database(database)
        with engine.connect() as connection:
            if database.startswith("mysql"):
                mine = connection.scalar(sa.text("SELECT connection_id()"))
                for row in connection.execute(sa.text("SHOW PROCESSLIST")).all():
                    if row.Id != mine and row.db == engine.url.database:
                        with contextlib.suppress(sa.exc.OperationalError):  # it ended by itself
                            connection.execute(sa.text(f"KILL {row.Id}"))
            else:
                connection.execute(sa.text(kill))
        engine.dispose()
        await client.report(jobs.samples("one", jobs.shape(1)))
        (row,) = await client.jobs()
    assert row.samples == 1


@dataclasses.dataclass
class Broken:
    """An optimiser of somebody's that fails."""

    whole: bool = False

    def advise(self, *_: object) -> dict[str, brain.Advice]:
        raise ZeroDivisionError("division by zero")


class Constant:
    """An optimiser of somebody's."""

    whole = False

    def advise(self, found: list[object], *_: object) -> dict[str, brain.Advice]:
        plan = ResourcePlan(groups={"worker": NodeGroup(count=7)}, reason="seven is enough")
        return {job.id: brain.Advice(plan=plan, reason=plan.reason) for job in found}  # type: ignore[attr-defined]


async def test_optimizers_can_be_installed(
    tmp_path: object, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathlib import Path

    info = Path(str(tmp_path)) / "somebody-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    lines = [
        f"{name} = {__name__}:{cls}" for name, cls in (("seven", "Constant"), ("bad", "Broken"))
    ]
    (info / "entry_points.txt").write_text("\n".join(["[dlrover.brain.optimizers]", *lines, ""]))
    monkeypatch.syspath_prepend(str(tmp_path))
    async with serve(f"sqlite:///{tmp_path}/brain.db") as client:
        for name in ("seven", "bad", "missing"):
            await client.report(jobs.register(name, optimizer=name))
        advice = await client.plan("seven", jobs.shape(1))
        assert advice.plan is not None
        assert advice.plan.groups["worker"].count == 7
        assert advice.optimizer == "seven"
        with pytest.raises(InfrastructureError, match="division by zero"):
            await client.plan("bad", jobs.shape(1))
        with pytest.raises(ConfigurationError, match="installed are bad, cluster, manual, seven"):
            await client.plan("missing", jobs.shape(1))
