"""Of two masters of one job only the later one counts, also when the earlier one was only stopped."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from dlrover.errors import InfrastructureError
from dlrover.master.files import read_outcome
from dlrover.master.journal.file import FileJournal
from dlrover.master.machine import inputs
from dlrover.rpc import messages
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.jobdir import MasterAddress
from tests.support.agents import SimulatedAgent
from tests.support.masters import MasterProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

REFUSED = "Another master has taken over the job with epoch 2; this one has epoch 1. It leaves."


def run(
    path: Path,
    test: Callable[[MasterProcess, MasterProcess], Awaitable[None]],
    recovery_grace: float = 20.0,
) -> str:
    """Give a test two masters of one job directory, the first of which serves; what they logged."""
    limits = Limits(
        heartbeat_interval=0.1,
        heartbeat_timeout=20.0,
        recovery_grace=recovery_grace,
        reconnect_grace=20.0,
    )
    job = JobSpec(name="job", min_nodes=2, max_nodes=2, max_restarts=3, limits=limits)

    async def main() -> None:
        first, second = MasterProcess(path, job), MasterProcess(path, job)
        await first.start()
        try:
            await test(first, second)
        finally:
            await second.__aexit__()
            await first.__aexit__()

    asyncio.run(asyncio.wait_for(main(), 50.0))
    return (path / "master.log").read_text()


async def left(master: MasterProcess) -> int:
    assert master.process is not None
    return await asyncio.to_thread(master.process.wait, 20)


def test_a_master_that_wakes_up_after_another_took_over_leaves(tmp_path: Path) -> None:
    async def test(first: MasterProcess, second: MasterProcess) -> None:
        clients = [first.client(), first.client()]
        agents = [SimulatedAgent(client) for client in clients]
        lives = [asyncio.create_task(agent.run()) for agent in agents]
        for agent in agents:
            await agent.running()
        agents[0].report(5)
        address = first.address
        first.signal(signal.SIGSTOP)
        await second.start()
        assert second.address != address
        for life, client in zip(lives, clients, strict=True):
            life.cancel()
            await client.move(second.address)
        lives = [asyncio.create_task(agent.run()) for agent in agents]
        for agent in agents:
            await agent.until(lambda a: a.machine.epoch == 2)
        entries = len(list(FileJournal(tmp_path / "journal.sqlite", read_only=True).entries()))
        first.signal(signal.SIGCONT)
        assert await left(first) == 3
        assert msgspec.json.decode(
            (tmp_path / "master.json").read_bytes(), type=MasterAddress
        ) == MasterAddress(second.address, second.pid)
        agents[0].fail()
        for agent in agents:
            await agent.running(2)
        for agent in agents:
            agent.succeed()
        for life in lives:
            assert (await life).exit_code == 0
        assert await left(second) == 0
        stored = [e for _, e in FileJournal(tmp_path / "journal.sqlite", read_only=True).entries()]
        assert sum(isinstance(e, inputs.MasterStarted) for e in stored) == 1
        assert len(stored) > entries
        assert not [e for e in stored if isinstance(e, inputs.NodeDisconnected)][2:]
        for client in clients:
            await client.close()

    log = run(tmp_path, test)
    assert log.count(REFUSED) == 1
    assert "Traceback" not in log


def test_an_old_master_that_hears_of_a_newer_one_leaves(tmp_path: Path) -> None:
    """Its journal does not know of the other one: an agent tells."""

    async def test(first: MasterProcess, _second: MasterProcess) -> None:
        async def says() -> AsyncIterator[messages.AgentMessage]:
            yield messages.Hello("uid", epoch=9)
            await asyncio.Event().wait()

        async with first.client() as client:
            with pytest.raises(InfrastructureError, match="Another master has taken over"):
                await anext(client.attend(says()))
        assert await left(first) == 3

    log = run(tmp_path, test, recovery_grace=0.0)
    assert "with epoch 9; this one has epoch 1. It leaves." in log


def test_a_master_goes_beyond_the_epoch_of_the_agents_of_a_lost_one(tmp_path: Path) -> None:
    async def test(first: MasterProcess, second: MasterProcess) -> None:
        async with first.client() as client:
            agent = SimulatedAgent(client)
            agent.machine.epoch = 1
            life = asyncio.create_task(agent.run())
            await agent.until(lambda a: a.node_id >= 0)
            # It met a master of this epoch elsewhere: this one goes beyond it.
            assert agent.machine.epoch == 2
            assert agent.machine.refuses(messages.Welcome(0, 1, 1.0, 1))
            assert not agent.machine.refuses(messages.Welcome(0, 1, 1.0, 2))
            life.cancel()

    run(tmp_path, test)


@pytest.mark.parametrize("name", ["job", "another"])
def test_a_job_that_is_given_another_jobs_journal_ends_and_that_job_goes_on(
    tmp_path: Path, name: str
) -> None:
    """The journal of a setting for all jobs of a user; they may even have the same name."""
    journal = f"file:{tmp_path}/journal.sqlite"

    def master(directory: str, job: str) -> MasterProcess:
        (tmp_path / directory).mkdir()
        return MasterProcess(tmp_path / directory, JobSpec(name=job), journal=journal)

    async def main() -> None:
        first, second = master("first", "job"), master("second", name)
        async with first:
            with pytest.raises(InfrastructureError, match="exit code 2"):
                await second.start()
            async with first.client() as client:
                await client.scale(1, "")  # it looks at the journal
                assert (await client.status()).phase == "waiting for nodes"
            first.kill()
            await first.start()
        await second.__aexit__()

    asyncio.run(asyncio.wait_for(main(), 50.0))
    outcome = read_outcome(tmp_path / "second" / "outcome.json")
    assert outcome is not None
    assert outcome.reason == (
        f"journal {journal}: the file has the state of the job job in {tmp_path}/first; each job takes a file of its own."
    )
    epochs = sqlite3.connect(tmp_path / "journal.sqlite").execute("SELECT epoch FROM master")
    assert epochs.fetchone() == (2,)
