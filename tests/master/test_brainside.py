"""What a master hears from a Brain: a real one, served in this process."""

import asyncio
import contextlib

import msgspec
import pytest

from dlrover.spec.jobdir import TlsFiles

pytest.importorskip("scipy")
pytest.importorskip("sqlalchemy")

from dlrover.brain.database import open_database
from dlrover.brain.service import Brain
from dlrover.errors import ConfigurationError
from dlrover.master.machine.scaling.autoscale import Question
from dlrover.master.machine.scaling.planner import decide
from dlrover.master.scaling import brainside
from dlrover.planning.throughput import TrustRegion
from dlrover.rpc import wire
from dlrover.rpc.brain import BrainClient, request_id
from dlrover.rpc.server import Server
from dlrover.spec.brain import ClusterNode, ReportCluster
from dlrover.spec.events import Event, PlanDropped
from dlrover.spec.job import JobSpec
from dlrover.spec.jobdir import BrainSide
from dlrover.spec.measurements import Batches, ModelProfile, NodeUsage, SpeedSample
from dlrover.spec.node import Size
from dlrover.spec.outcome import Outcome
from dlrover.spec.plan import NodeGroup, ResourcePlan, ScaleKind

pytestmark = pytest.mark.slow

TOKEN = "the-token-of-the-brain"
MACHINE = ClusterNode(name="big", capacity={"accelerator": 16.0})
SUCCESS = Outcome(exit_code=0, reason="All workers succeeded.")
JOB = JobSpec(name="my job", min_nodes=1, max_nodes=8, managed_nodes=1, auto_scale=True)


def sample(nodes: int, step: float) -> SpeedSample:
    return SpeedSample(nodes=nodes, replicas=nodes, step_seconds=step, steps=20)


def question(current: SpeedSample, sizes=range(1, 9)) -> Question:
    return Question(current, (current,), sizes, TrustRegion(), 0.5, True)


@contextlib.asynccontextmanager
async def story(
    tmp_path,
    *,
    serve: bool = True,
    cluster: bool = True,
    secret: str = "secret",
    job: JobSpec = JOB,
):
    """A job beside a Brain, and what looks into that."""
    brain = Brain(open_database(f"sqlite:///{tmp_path}/brain.db"))
    server = Server(TOKEN, service=wire.BRAIN_SERVICE)
    brain.register(server)
    port = await server.start("127.0.0.1", 0)
    if not serve:
        await server.stop(0)
    side = BrainSide(
        address=f"127.0.0.1:{port}",
        cluster=cluster,
        program="train.py",
        origin="uid-1",
        node=NodeGroup(count=1, accelerators=1),
    )
    job = brainside.connect(side, job, secret, TlsFiles(), {brainside.TOKEN: TOKEN})
    try:
        async with BrainClient(side.address, TOKEN) as client:
            if serve:
                await client.report(ReportCluster(request=request_id(), nodes=(MACHINE,)))
            yield job, client
    finally:
        await job.close()
        await server.stop(0)
        brain.close()


def test_it_is_told_of_a_job_and_chooses_its_size(tmp_path):
    async def run() -> None:
        async with story(tmp_path) as (job, client):
            usage = {0: NodeUsage(1.5, 1 << 30, 4 << 30)}
            for one in (sample(1, 0.1), sample(2, 0.102)):
                job.measured(one, ModelProfile(parameters=7), usage)
            answered, decision = await job.size(question(sample(2, 0.102)))
            assert answered
            assert (decision.kind, decision.plan_id != "") == (ScaleKind.GROW, True)
            assert decision.nodes > 2
            known = await client.explain(job.id)
            assert [s.throughput for s in known.samples] == pytest.approx([10.0, 19.6], rel=0.01)
            assert known.job.description.features["parameters"] == 7
            assert known.nodes[0].cpu == 1.5
            job.happened(Event(1, 0.0, PlanDropped(1, "no nodes", decision.plan_id)))
            job.ended(SUCCESS)
        async with story(tmp_path, secret="other") as (_, client):
            known = await client.explain(job.id)
            assert known.plans[-1].state == "refused"
            assert known.job.state == "succeeded"
            assert known.outcome == SUCCESS
            assert job.id in [row.job for row in await client.jobs(origin="uid-1")]
            assert await client.jobs(origin="uid-%") == ()

    asyncio.run(run())


def test_it_hears_once_what_a_similar_job_has_measured(tmp_path):
    async def run() -> None:
        async with story(tmp_path, cluster=False) as (past, _):
            for one in (sample(1, 0.1), sample(2, 0.102)):
                past.measured(one, ModelProfile(parameters=7), {})
            past.ended(SUCCESS)
        async with story(tmp_path, cluster=False, secret="other") as (job, _):
            job.measured(sample(1, 0.1), ModelProfile(parameters=7), {})
            found = await job.similar()
            assert (found.name, found.similarity) == ("my job", 1.0)
            assert [s.shape.groups["worker"].count for s in found.samples] == [1, 2]
            assert await job.similar() is found
            decision = decide(question(sample(1, 0.1)), found)
            assert decision.plan.reason.endswith("by the similar job my job")

    asyncio.run(run())


@pytest.mark.parametrize(("most", "larger"), [(1024, True), (128, False)])
def test_a_noisy_job_that_allows_it_gets_another_batch(tmp_path, most, larger):
    batches = Batches(least=128, most=most, pass_most=32, square=1.0, variance=1e6)
    noisy = SpeedSample(
        nodes=2, replicas=2, step_seconds=0.35, steps=20, compute_seconds=0.2, total_batch=128,
        batches=batches,
    )  # fmt: skip

    async def run() -> None:
        async with story(tmp_path) as (job, look):
            job.measured(noisy, ModelProfile(), {})
            answered, decision = await job.size(question(noisy))
            assert answered
            assert (decision is not None and decision.batch in range(200, 257)) is larger
            seen = (await look.explain(job.id)).samples[0]
            assert (seen.shape.batch, seen.shape.passes) == (32, 2)
            assert seen.compute_seconds == pytest.approx(0.1)
            assert seen.batches == batches

    asyncio.run(run())


def test_a_size_that_the_job_may_not_have_is_none(tmp_path):
    async def run() -> None:
        async with story(tmp_path) as (job, _):
            for one in (sample(1, 0.1), sample(2, 0.102)):
                job.measured(one, ModelProfile(), {})
            found = await job.size(question(sample(2, 0.102), sizes=[1, 2]))
            assert found == (True, None)

    asyncio.run(run())


def test_a_brain_that_is_away_says_nothing_and_the_job_starts_as_it_was_told(tmp_path):
    async def run() -> None:
        async with story(tmp_path, serve=False) as (job, _):
            assert await job.size(question(sample(1, 0.1))) == (False, None)
            assert await job.first(JOB) == JOB
            assert await job.similar() is None

    asyncio.run(run())


def test_without_a_similar_past_job_a_job_starts_small(tmp_path):
    async def run() -> None:
        async with story(tmp_path, cluster=False) as (job, _):
            first = await job.first(JobSpec(name="my job", max_nodes=8, managed_nodes=4))
            assert first.managed_nodes == 1
            assert "no similar past job" in first.first_size

    asyncio.run(run())


def test_without_a_token_there_is_a_sentence(tmp_path):
    side = BrainSide(address="brain:1")
    with pytest.raises(ConfigurationError) as caught:
        brainside.connect(side, JOB, "secret", TlsFiles(), {})
    assert str(caught.value) == (
        "The token of the Brain at brain:1 is missing: set brain_token_file or DLROVER_BRAIN_TOKEN."
    )
    with pytest.raises(ConfigurationError, match="brain_token_file /nowhere cannot be read"):
        brainside.connect(
            BrainSide(address="brain:1", token_file="/nowhere"), JOB, "secret", TlsFiles(), {}
        )


def test_without_an_address_there_is_no_brain():
    assert brainside.connect(BrainSide(), JOB, "", TlsFiles(), {}) is None


def test_the_brain_does_not_choose_the_size_of_a_job_that_keeps_it(tmp_path):
    async def run() -> None:
        fixed = msgspec.structs.replace(JOB, auto_scale=False)
        async with story(tmp_path, job=fixed) as (job, client):
            assert not job.cluster
            job.measured(sample(2, 0.1), ModelProfile(parameters=7), {})
            job.ended(SUCCESS)
        async with story(tmp_path, secret="other") as (_, client):
            known = await client.explain(job.id)
            assert (known.job.description.mode, known.outcome) == ("single-job", SUCCESS)
            assert [one.throughput for one in known.samples] == pytest.approx([20.0], rel=0.01)

    asyncio.run(run())


def test_a_size_with_servers_in_the_brains_terms():
    served = SpeedSample(
        nodes=2, replicas=4, step_seconds=0.1, steps=20, servers=3, server_cpu=8.0, worker_cpu=4.0
    )
    shape = brainside.shape_of(served, NodeGroup(count=1, cpu=4.0))
    assert shape.groups == {
        "worker": NodeGroup(count=2, cpu=4.0),
        "ps": NodeGroup(count=3, cpu=8.0),
    }
    assert shape.per_node == 2
    plan = ResourcePlan(groups={"ps": NodeGroup(count=1)}, reason="one is enough")
    assert brainside.size_of(plan, served.size) == Size(2, 1)
    assert brainside.size_of(plan, Size(2)) == Size(2), "a job without servers gets none"
