"""Tenants of a Brain: each has a token and sees its own jobs, whatever ids it names."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dlrover.brain import tables
from dlrover.brain.database import open_database
from dlrover.brain.known import past_jobs
from dlrover.brain.service import Brain
from dlrover.brain.tenants import Tenant, read_tenants
from dlrover.errors import ConfigurationError, ProtocolError
from dlrover.rpc import wire
from dlrover.rpc.brain import BrainClient
from dlrover.rpc.server import Server
from dlrover.spec import brain
from tests.brain import jobs

OPERATOR = "the-token-of-the-operator"
SPEECH = Tenant(token="x" * 16, priority=2.0, queues=("research", "batch"))
TOKENS = {"vision": "a-token-of-the-tenant-vision", "speech": "a-token-of-the-tenant-speech"}


@contextlib.asynccontextmanager
async def clients(folder: Path) -> AsyncIterator[tuple[BrainClient, BrainClient, BrainClient]]:
    """The operator, vision and speech at one Brain."""
    limits = {"vision": Tenant(token="x" * 16), "speech": SPEECH}
    served = Brain(open_database(f"sqlite:///{folder}/brain.db"), tenants=limits)
    server = Server(OPERATOR, None, wire.BRAIN_SERVICE, "Brain", TOKENS)
    served.register(server)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    try:
        async with (
            BrainClient(address, OPERATOR) as operator,
            BrainClient(address, TOKENS["vision"]) as vision,
            BrainClient(address, TOKENS["speech"]) as speech,
        ):
            yield operator, vision, speech
    finally:
        await server.stop(0)
        served.close()


async def test_a_tenant_reports_and_reads_for_its_own_jobs_only(tmp_path: Path) -> None:
    async with clients(tmp_path) as (operator, vision, speech):
        await vision.report(jobs.register("one"))
        await vision.report(jobs.samples("one", jobs.shape(1)))
        advice = await vision.plan("one", jobs.shape(1))
        for id_ in ("one", "vision", "vision/one"):
            with pytest.raises(ConfigurationError, match="knows no job"):
                await speech.report(jobs.samples(id_, jobs.shape(8)))
            with pytest.raises(ConfigurationError, match="knows no job"):
                await speech.explain(id_)
        with pytest.raises(ConfigurationError, match="knows no job"):
            await speech.plan("one", jobs.shape(1), advice.plan_id)
        with pytest.raises(ProtocolError):
            await speech.report(jobs.samples("vision one", jobs.shape(8)))
        assert [row.job for row in await vision.jobs()] == ["one"]
        assert await speech.jobs() == ()
        assert [row.job for row in await operator.jobs()] == ["vision one"]
        assert (await operator.explain("vision one")).plans
        assert (await operator.effect("vision one", 2)).plan
        story = await vision.explain("one")
        assert (story.job.job, story.plans[0].plan_id) == ("one", advice.plan_id)


async def test_two_tenants_may_have_a_job_and_a_request_of_one_name(tmp_path: Path) -> None:
    async with clients(tmp_path) as (_, vision, speech):
        register = jobs.register("one")
        await vision.report(register)
        await speech.report(register)
        measured = jobs.samples("one", jobs.shape(1))
        await vision.report(measured)
        assert len((await vision.explain("one")).samples) == 1
        assert (await speech.explain("one")).samples == ()


async def test_a_tenant_learns_from_its_own_past_jobs_only(tmp_path: Path) -> None:
    features: dict[str, str | float] = {"model": "bert"}
    async with clients(tmp_path) as (_, vision, speech):
        await vision.report(jobs.register("past", features=features))
        await vision.report(jobs.samples("past", jobs.shape(4)))
        await vision.report(jobs.end("past"))
        for client, name, nodes in ((vision, "past", 4), (speech, "", 1)):
            await client.report(jobs.register("new", features=features))
            assert (await client.similar("new")).name == name
            plan = (await client.plan("new", None)).plan
            assert plan is not None
            assert plan.groups["worker"].count == nodes


async def test_a_tenant_learns_from_its_own_past_jobs_only_where_the_cluster_is_divided(
    tmp_path: Path,
) -> None:
    features: dict[str, str | float] = {"model": "bert"}
    async with clients(tmp_path) as (operator, vision, speech):
        await operator.report(jobs.machines(9))
        await vision.report(jobs.register("past", features=features))
        await vision.report(jobs.samples("past", jobs.shape(4)))
        await vision.report(jobs.end("past"))
        for client, nodes in ((vision, 4), (speech, 1)):
            await client.report(jobs.register("new", features=features, mode="cluster"))
            plan = (await client.plan("new", None)).plan
            assert plan is not None
            assert plan.groups["worker"].count == nodes


def test_tenants_whose_names_differ_in_case_are_different_ones(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path}/brain.db")
    with engine.begin() as connection:
        for id_ in ("vision one", "Vision one", "vision"):
            described = msgspec.json.encode(brain.Description(name=id_)).decode()
            shape = msgspec.json.encode(jobs.shape(1)).decode()
            row = {"id": id_, "description": described, "shape": shape, "state": "succeeded"}
            row |= {"mode": "single", "reason": ""}
            numbers = {"registered": 0.0, "ended": 0.0, "throughput": 1.0, "done": 0.0}
            connection.execute(tables.jobs.insert(), row | numbers)
        for tenant, names in (("vision", ["vision one"]), ("", ["vision"])):
            assert [one.name for one in past_jobs(connection, tenant).jobs] == names
    engine.dispose()


async def test_the_cluster_is_the_operators(tmp_path: Path) -> None:
    async with clients(tmp_path) as (operator, vision, _):
        for forbidden in (jobs.machines(1), brain.SetQuota(request="r", queue="q", limits={})):
            with pytest.raises(ProtocolError, match="operator"):
                await vision.report(forbidden)
        for ask in (vision.cluster, vision.divide):
            with pytest.raises(ProtocolError, match="operator"):
                await ask()
        await operator.report(jobs.machines(1))
        with pytest.raises(ConfigurationError, match="token"):
            async with BrainClient(operator.address, "vision") as guesser:
                await guesser.jobs()


def test_tokens_are_files_named_as_their_tenants(tmp_path: Path) -> None:
    for name, token in TOKENS.items():
        (tmp_path / name).write_text(token + "\n")
    (tmp_path / "..data").mkdir()
    (tmp_path / "speech").write_text(f"{TOKENS['speech']}\npriority = 2\nqueues = ['a', 'b']\n")
    assert read_tenants(str(tmp_path), OPERATOR) == {
        "vision": Tenant(token=TOKENS["vision"]),
        "speech": Tenant(token=TOKENS["speech"], priority=2.0, queues=("a", "b")),
    }
    assert read_tenants("", OPERATOR) == {}


async def test_a_tenant_claims_no_more_than_the_operator_allows(tmp_path: Path) -> None:
    async with clients(tmp_path) as (operator, vision, speech):
        for client, claim, said in (
            (vision, {"priority": 1.5}, "priority is 1.5: .* may have 1 at most"),
            (vision, {"queue": "research"}, "queue is research: .* may name vision"),
            (speech, {"queue": "vision"}, "queue is vision: .* may name research or batch"),
            (speech, {"priority": 3.0}, "priority is 3: .* may have 2 at most"),
        ):
            with pytest.raises(ProtocolError, match=said):
                await client.report(jobs.register("one", **claim))
        await vision.report(jobs.register("one"))
        await speech.report(jobs.register("one", priority=2.0))
        await speech.report(jobs.register("two", queue="batch"))
        await operator.report(jobs.register("three", priority=9.0, queue="any"))
        queues = {row.job: row.description.queue for row in await operator.jobs()}
        assert queues == {
            "vision one": "vision", "speech one": "research", "speech two": "batch", "three": "any",
        }  # fmt: skip


async def test_a_tenants_job_has_the_size_that_it_has_reported(tmp_path: Path) -> None:
    async with clients(tmp_path) as (_, vision, _):
        await vision.report(jobs.register("one"))
        with pytest.raises(ProtocolError, match="current has 8 worker nodes"):
            await vision.plan("one", jobs.shape(8))
        await vision.report(jobs.samples("one", jobs.shape(1)))
        with pytest.raises(ProtocolError, match="current has 8 worker nodes"):
            await vision.plan("one", jobs.shape(8))
        assert (await vision.plan("one", jobs.shape(1))).reason


@pytest.mark.parametrize(
    ("name", "token", "said"),
    [
        ("a b", "x" * 32, "has a file a b"),
        ("a" * 21, "x" * 32, "1 to 20 letters"),
        ("short", "x" * 15, "has 15 characters"),
        ("same", OPERATOR, "is that of the operator"),
        ("first", "x" * 32 + "\npriority = 0", "tenant first is wrong below its token: .*priority"),
        ("other", "x" * 32 + "\nqueue = 'a'", "below its token: .*queue.* takes priority"),
        ("text", "x" * 32 + "\nmore of it", "tenant text is wrong below its token"),
    ],
)
def test_a_wrong_token_is_refused(tmp_path: Path, name: str, token: str, said: str) -> None:
    (tmp_path / name).write_text(token)
    with pytest.raises(ConfigurationError, match=said):
        read_tenants(str(tmp_path), OPERATOR)
    with pytest.raises(ConfigurationError, match="not a directory"):
        read_tenants(str(tmp_path / "missing"), OPERATOR)
