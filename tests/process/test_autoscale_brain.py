"""A job that finds its size beside a Brain, which is a process of its own."""

import asyncio
import getpass

import pytest

from dlrover.errors import ExitCode
from dlrover.rpc.brain import BrainClient, request_id
from dlrover.spec import brain, events
from dlrover.spec.plan import NodeGroup
from tests.brain import processes

pytest.importorskip("scipy")
pytest.importorskip("sqlalchemy")

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(120)]

SHAPE = brain.Shape(groups={"worker": NodeGroup(count=2)})


def ask(address: str, question):
    async def asking():
        async with BrainClient(address, processes.TOKEN) as client:
            return await question(client)

    return asyncio.run(asking())


async def remember_a_job(client: BrainClient, throughput: dict[int, float]) -> None:
    """One like those of the tests, which has measured some sizes and ended well with two nodes."""
    features = {"name": "law", "program": "law.py", "user": getpass.getuser()}
    space = brain.Space(workers=brain.Range(1, 3))
    described = brain.Description(name="law", features=features, space=space)
    samples = tuple(
        brain.Sample(shape=brain.Shape(groups={"worker": NodeGroup(count=nodes)}), throughput=speed)
        for nodes, speed in throughput.items()
    )
    for report in (
        brain.RegisterJob(request=request_id(), job="past", description=described),
        brain.ReportSamples(request=request_id(), job="past", samples=samples),
        brain.ReportEnd(request=request_id(), job="past", state="succeeded", shape=SHAPE),
    ):
        await client.report(report)


def test_a_job_starts_like_a_past_one_tells_its_brain_and_goes_on_without_it(run) -> None:
    out = run.directory / "out"
    out.mkdir()
    with processes.brain(f"sqlite:///{run.directory}/brain.db") as server:
        ask(server.address, lambda client: remember_a_job(client, {2: 16.0}))
        launch = run(
            *("--nnodes=1:3", "--local-nodes=1", "--auto-scale", "--rdzv-conf=autoscale_window=2"),
            *(run.scripts / "law.py", out, "0.1,0.12,0.3"),
            env={"DLROVER_BRAIN": server.address, "DLROVER_BRAIN_TOKEN": processes.TOKEN},
        )
        launch.until(lambda: launch.events_of(events.FirstSize), 30, "a first size")
        first = launch.events_of(events.FirstSize)[0].body
        assert first.nodes == 2
        assert "started from 1 similar past job" in first.reason
        launch.until(lambda: launch.events_of(events.PlanMade), 60, "a plan")
        (ours,) = (
            job for job in ask(server.address, lambda client: client.jobs()) if job.job != "past"
        )

        def known():
            story = ask(server.address, lambda client: client.explain(ours.job))
            return story if len(story.plans) == 2 else None

        story = run.until(known, 20, "both plans")
        assert story.samples[0].shape.groups["worker"].count == 2
        assert story.job.description.features["parameters"] == 4
        assert (story.plans[0].optimizer, story.plans[0].state) == ("single-job", "applied")
        assert story.plans[1].optimizer == "master"
        server.process.kill()
    launch.until(lambda: launch.events_of(events.PlanMeasured), 60, "the plan's outcome")
    agents = launch.of_kind("agent")
    assert agents
    assert not any("DLROVER_BRAIN_TOKEN" in agent.environ() for agent in agents)
    assert run.dlrover("stop", "--job-dir", launch.job_dir).returncode == 0
    launch.end_with(ExitCode.STOPPED)


def test_a_job_that_keeps_its_size_is_in_the_brains_history(run) -> None:
    out = run.directory / "out"
    out.mkdir()
    program = (run.scripts / "law.py", out, "0.1,0.12")
    options = ("--nproc-per-node=2", "--rdzv-conf=autoscale_window=2")
    with processes.brain(f"sqlite:///{run.directory}/brain.db") as server:
        launch = run(
            *options, *program,
            env={"DLROVER_BRAIN": server.address, "DLROVER_BRAIN_TOKEN": processes.TOKEN},
        )  # fmt: skip

        def measured():
            jobs = ask(server.address, lambda client: client.jobs())
            story = jobs and ask(server.address, lambda client: client.explain(jobs[0].job))
            return story if story and story.samples else None

        story = launch.until(measured, 60, "a measurement")
        assert story.samples[0].shape.groups["worker"].count == 1
        assert 10 < story.samples[0].throughput < 20, (
            "samples per second: two in each step of 0.12 s"
        )
        assert not launch.events_of(events.FirstSize)
        assert run.dlrover("stop", "--job-dir", launch.job_dir).returncode == 0
        launch.end_with(ExitCode.STOPPED)
        (job,) = ask(server.address, lambda client: client.jobs())
        assert job.state == "stopped"
        assert ask(server.address, lambda c: c.explain(job.job)).outcome.goodput.goodput_ratio > 0


@pytest.mark.parametrize("file", ["", "/proc/self/mem"], ids=["none", "a file that fails"])
def test_a_job_that_keeps_its_size_goes_on_without_the_brains_token(run, file: str) -> None:
    env = {"DLROVER_BRAIN": "127.0.0.1:9", "DLROVER_BRAIN_TOKEN_FILE": file}
    launch = run("--no-python", "/bin/true", env=env)
    launch.succeed(30)
    assert "goes on without the Brain" in (launch.job_dir / "master.log").read_text()


def test_a_known_program_tries_no_size(run) -> None:
    """A past job has measured all sizes: three nodes do not pay, and two are the best."""
    out = run.directory / "out"
    out.mkdir()
    with processes.brain(f"sqlite:///{run.directory}/brain.db") as server:
        ask(server.address, lambda c: remember_a_job(c, {1: 10.0, 2: 16.5, 3: 10.0}))
        launch = run(
            *("--nnodes=1:3", "--local-nodes=1", "--auto-scale", "--rdzv-conf=autoscale_window=2"),
            *(run.scripts / "law.py", out, "0.1,0.12,0.3"),
            env={"DLROVER_BRAIN": server.address, "DLROVER_BRAIN_TOKEN": processes.TOKEN},
        )
        launch.until(lambda: launch.events_of(events.SizeSettled), 60, "a size that is settled")
        assert launch.events_of(events.SizeSettled)[0].body.nodes == 2
        assert not launch.events_of(events.PlanMade)
        assert run.dlrover("stop", "--job-dir", launch.job_dir).returncode == 0
        launch.end_with(ExitCode.STOPPED)
        (ours,) = (job for job in ask(server.address, lambda c: c.jobs()) if job.job != "past")
        end = ask(server.address, lambda c: c.explain(ours.job)).outcome
    assert (end.exit_code, ours.state) == (ExitCode.STOPPED, "stopped")
    assert end.goodput.goodput_ratio > 0
