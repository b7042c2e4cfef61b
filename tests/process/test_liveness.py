"""The liveness probe of a master's pod: it fails of a master that stands still, and of no other."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path

import pytest

from dlrover.kubernetes.machine import objects
from dlrover.master import liveness
from dlrover.spec.job import JobSpec, Limits
from tests.support.agents import SimulatedAgent
from tests.support.masters import MasterProcess
from tests.waiting import until

pytestmark = pytest.mark.slow

AGENTS, CONNECTIONS = 400, 10
MESSAGES = 10_000
"""Heartbeats that the agents send while the master is probed."""


async def fails(port: int) -> bool:
    """Whether a kubelet would count this probe as a failure."""
    probe = objects.liveness_probe(port)
    asked = ["timeout", str(probe["timeoutSeconds"]), *probe["exec"]["command"]]
    done = await asyncio.to_thread(
        subprocess.run, asked, cwd="/", stderr=subprocess.DEVNULL, check=False
    )
    return done.returncode != 0


async def port_of(master: MasterProcess) -> int:
    """The port of a master that has its socket, too."""
    port = int(master.address.rpartition(":")[2])
    name = f"@dlrover-master-{port}\n"
    await asyncio.to_thread(until, lambda: name in Path("/proc/net/unix").read_text())
    return port


async def sent(agents: list[SimulatedAgent], interval: float) -> None:
    """Wait until all agents have connected, and for the time in which they send all messages."""
    for agent in agents:
        await agent.until(lambda agent: agent.node_id >= 0)
    await asyncio.sleep(MESSAGES / len(agents) * interval)


@pytest.mark.timeout(180)
def test_a_master_with_ten_thousand_messages_before_it_is_alive(tmp_path: Path) -> None:
    job = JobSpec(
        name="job", min_nodes=AGENTS, max_nodes=AGENTS, limits=Limits(heartbeat_interval=0.1)
    )

    async def story() -> None:
        async with MasterProcess(tmp_path, job) as master:
            port = await port_of(master)
            clients = [master.client() for _ in range(CONNECTIONS)]
            agents = [
                SimulatedAgent(clients[i % CONNECTIONS], phase=i / AGENTS) for i in range(AGENTS)
            ]
            lives = [asyncio.create_task(agent.run()) for agent in agents]
            sending = asyncio.create_task(sent(agents, job.limits.heartbeat_interval))
            while not sending.done():
                assert not await fails(port)
            await sending
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)
            for client in clients:
                await client.close()

    asyncio.run(story())


def test_a_master_that_stands_still_fails_its_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PROBE_TIMEOUT", 1)

    async def story() -> None:
        async with MasterProcess(tmp_path, JobSpec(name="job")) as master:
            port, process = await port_of(master), master.process
            assert process is not None
            assert not await fails(port)
            process.send_signal(signal.SIGSTOP)
            assert await fails(port)
            process.send_signal(signal.SIGCONT)
            assert not await fails(port)
            master.kill()
            assert not await fails(port), "the pod ends with the master, without its probe"

    asyncio.run(story())


def test_of_two_masters_with_one_port_the_first_is_probed() -> None:
    async def story() -> None:
        async with liveness.answering(1):
            async with liveness.answering(1):
                assert not await fails(1)
            assert not await fails(1)

    asyncio.run(story())
