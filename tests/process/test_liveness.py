"""The liveness probe of a master's pod: it fails of a master that stands still, and of no other."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from dlrover.kubernetes.machine import objects
from dlrover.master import liveness
from dlrover.roles.spec import EntryForm, EntryPoint, RolesConfig, RolesJob, RoleSpec
from dlrover.rpc.client import MasterClient
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.jobdir import JobDir, MasterAddress, liveness_socket
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


async def port_of(job_dir: JobDir) -> int:
    """The port of a master that has its socket, too."""
    found = msgspec.json.decode(job_dir.master.read_bytes(), type=MasterAddress)
    port = int(found.address.rpartition(":")[2])
    name = f"@dlrover-master-{port}\n"
    await asyncio.to_thread(until, lambda: name in Path("/proc/net/unix").read_text())
    return port


async def sent(agents: list[SimulatedAgent], client: MasterClient) -> None:
    """Send all messages at once when all agents train, and wait until the master has taken them."""
    for agent in agents:
        await agent.running()
    last = MESSAGES // AGENTS
    for steps in range(1, last + 1):
        for agent in agents:
            agent.report(steps)
    while any(node.steps < last for node in (await client.status()).nodes):
        await asyncio.sleep(0.1)


@pytest.mark.timeout(180)
def test_a_master_with_ten_thousand_messages_before_it_is_alive(tmp_path: Path) -> None:
    job = JobSpec(
        name="job", min_nodes=AGENTS, max_nodes=AGENTS, limits=Limits(heartbeat_interval=1.0)
    )

    async def story() -> None:
        async with MasterProcess(tmp_path, job) as master:
            port = await port_of(master.job_dir)
            clients = [master.client() for _ in range(CONNECTIONS)]
            agents = [
                SimulatedAgent(clients[i % CONNECTIONS], phase=i / AGENTS) for i in range(AGENTS)
            ]
            lives = [asyncio.create_task(agent.run()) for agent in agents]
            sending = asyncio.create_task(sent(agents, clients[0]))
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
            port, process = await port_of(master.job_dir), master.process
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
    async def answer() -> bytes:
        reader, writer = await asyncio.open_unix_connection(liveness_socket(1))
        said = await reader.read()
        writer.close()
        return said

    async def story() -> None:
        async with liveness.answering(1):
            async with liveness.answering(1):
                assert await answer() == b"1"
            assert await answer() == b"1"
        with pytest.raises(ConnectionRefusedError):
            await answer()

    asyncio.run(story())


def test_a_coordinator_that_stands_still_fails_its_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PROBE_TIMEOUT", 1)
    job_dir = JobDir(tmp_path)
    job_dir.token.write_text("token")
    script = tmp_path / "waits.py"
    script.write_text("import signal\nsignal.pause()\n")
    role = RoleSpec(name="a", entry=EntryPoint(EntryForm.SCRIPT, str(script)))
    job = RolesJob(name="job", roles=(role,))
    job_dir.roles.write_bytes(msgspec.json.encode(RolesConfig(job=job)))
    reading, writing = os.pipe()  # the coordinator and its role end when it closes
    command = [sys.executable, "-m", "dlrover.roles", "--job-dir", str(tmp_path)]
    command += ["--lifeline-fd", str(reading)]

    async def story(coordinator: subprocess.Popen[bytes]) -> None:
        await asyncio.to_thread(until, job_dir.master.exists)
        port = await port_of(job_dir)
        assert not await fails(port)
        coordinator.send_signal(signal.SIGSTOP)
        assert await fails(port)
        coordinator.send_signal(signal.SIGCONT)
        assert not await fails(port)

    with subprocess.Popen(command, pass_fds=[reading]) as coordinator:
        os.close(reading)
        try:
            asyncio.run(story(coordinator))
        finally:
            os.close(writing)
            coordinator.send_signal(signal.SIGCONT)
            coordinator.wait(30)
