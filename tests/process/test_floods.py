"""Thousands of nodes whose workers all fail at once, with long texts: a real master stays small."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dlrover.agent.machine import node as agent_machine
from dlrover.errors import InfrastructureError, ProtocolError
from dlrover.master.journal import history
from dlrover.rpc import messages, wire
from dlrover.rpc.client import MasterClient
from dlrover.spec import events
from dlrover.spec.failure import TEXT_LIMIT, Failure, FailureKind
from dlrover.spec.job import JobSpec, Limits
from tests.support.agents import SimulatedAgent
from tests.support.masters import MasterProcess

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(120)]

MIB = 2**20
STREAMS = 2000
WORKERS = 5
CONNECTIONS = 20
LARGEST = 768 * MIB
"""Resident bytes of the master at the worst moment, with 2,000 nodes and a report of each on its way.

The texts of all failures are 470 MiB; what is kept of them is less than 80 MiB.
"""
IN_TIME = 120.0


def failure(agent: SimulatedAgent, local_rank: int, when: float, *, echo: bool) -> Failure:
    """A failure with three texts of the largest size."""
    world = agent.world
    assert world is not None
    reason = "Connection closed by peer [10.0.0.1]:40404" if echo else "the cause of it all"
    rank = world.first_rank + local_rank
    text = f"{rank:.>{TEXT_LIMIT}}"
    return Failure(
        id=f"failure of rank {rank}",
        kind=FailureKind.EXCEPTION,
        node_id=agent.node_id,
        rank=rank,
        local_rank=local_rank,
        round=world.round,
        time=when,
        exit_code=1,
        exception="RuntimeError" if echo else "ValueError",
        message=text[: TEXT_LIMIT - 100] + reason,
        traceback=text,
        stderr_tail=text[::-1],
    )


async def watch_size(process: psutil.Process) -> int:
    """The largest resident size until this is cancelled."""
    largest = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            largest = max(largest, process.memory_info().rss)
            await asyncio.sleep(0.05)
    return largest


class Slow(SimulatedAgent):
    """An agent whose workers take long to stop, so that its node's last report comes late."""

    def _carry_out(self, command: agent_machine.Command) -> None:
        if not isinstance(command, agent_machine.StopWorkers):
            super()._carry_out(command)


async def flood(master: MasterProcess, agents: list[SimulatedAgent]) -> tuple[float, int]:
    """Let all workers of all nodes fail, the cause last; seconds taken and the master's largest size."""
    watching = asyncio.create_task(watch_size(psutil.Process(master.pid)))
    began, now = time.monotonic(), time.time()
    last = agents[-1]
    cause = failure(last, WORKERS - 1, now - 1.0, echo=False)
    reports = [
        (agent, failure(agent, local_rank, now + local_rank, echo=True))
        for local_rank in range(WORKERS)
        for agent in agents
    ]
    for agent, report in reports[:-1]:
        agent._say(messages.Failed(report))
    async with MasterClient(master.address, master.token, timeout=60.0) as other:
        while len(failures(master)) < STREAMS * WORKERS - 1:
            await other.status()  # it serves others meanwhile
            await asyncio.sleep(0.5)
    last._say(messages.Failed(cause))
    await last.until(lambda a: a.machine.outcome is not None)
    took = time.monotonic() - began
    watching.cancel()
    return took, await watching


def failures(master: MasterProcess) -> list[events.Event]:
    stored = history.read(master.job_dir.events)
    return [event for event in stored if isinstance(event.body, events.WorkerFailed)]


@pytest.mark.heavy
def test_ten_thousand_long_failures_over_two_thousand_streams(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    limits = Limits(heartbeat_timeout=600.0, reconnect_grace=600.0, join_timeout=600.0)
    job = JobSpec(name="job", min_nodes=STREAMS, max_nodes=STREAMS, limits=limits)

    async def main() -> None:
        async with contextlib.AsyncExitStack() as stack:
            master = await stack.enter_async_context(MasterProcess(tmp_path, job))
            clients = [await stack.enter_async_context(master.client()) for _ in range(CONNECTIONS)]
            agents = [
                (Slow if i == STREAMS - 1 else SimulatedAgent)(
                    clients[i % CONNECTIONS], nproc=WORKERS
                )
                for i in range(STREAMS)
            ]
            lives = [asyncio.create_task(agent.run()) for agent in agents]
            for agent in agents:
                await agent.running()
            before = psutil.Process(master.pid).memory_info().rss
            took, largest = await flood(master, agents)
            record_property("MiB before", before / MIB)
            record_property("seconds", took)
            record_property("MiB", largest / MIB)
            assert largest < LARGEST, f"{largest / MIB:.0f} MiB"
            assert took < IN_TIME
            found = agents[-1].machine.outcome
            assert found is not None
            assert found.failure is not None
            assert found.failure.message.endswith("the cause of it all")
            assert len(found.failure.traceback) == TEXT_LIMIT
            assert len(failures(master)) == STREAMS * WORKERS
            for life in lives[:-1]:
                await life
            lives[-1].cancel()
            await asyncio.gather(lives[-1], return_exceptions=True)
            assert await asyncio.to_thread(master.process.wait, 40) == 1

    asyncio.run(main())
    journal = sum(file.stat().st_size for file in tmp_path.glob("journal.sqlite*"))
    assert journal < 100 * MIB


def test_a_report_larger_than_a_message_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            MasterProcess(tmp_path, JobSpec(name="job")) as master,
            master.client() as client,
        ):
            agent = SimulatedAgent(client)
            life = asyncio.create_task(agent.run())
            await agent.running()
            huge = agent.failure(traceback="x" * wire.MAX_MESSAGE_BYTES)
            async with MasterClient(master.address, master.token) as other:

                async def says():
                    yield messages.Hello("other")
                    yield messages.Failed(huge)
                    await asyncio.Event().wait()

                with pytest.raises((ProtocolError, InfrastructureError)):
                    async for _ in other.attend(says()):
                        pass
            assert (await client.status()).phase == "running"
            life.cancel()

    asyncio.run(main())
