"""A real master process: killed, stopped, flooded and fed with nonsense, it keeps its job."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import psutil
import pytest

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.master.journal import history
from dlrover.master.service import STALLED
from dlrover.rpc import messages, wire
from dlrover.rpc.client import MasterClient
from dlrover.spec import events
from dlrover.spec.job import JobSpec, Limits
from tests.support.agents import SimulatedAgent
from tests.support.masters import MasterProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "master_load.py"
MIB = 2**20


def run(
    path: Path,
    test: Callable[[MasterProcess], Awaitable[None]],
    limits: dict[str, Any] | None = None,
    **spec: Any,
) -> None:
    job = JobSpec(name="job", limits=Limits(**(limits or {})), **spec)

    async def main() -> None:
        async with MasterProcess(path, job) as master:
            await test(master)

    asyncio.run(asyncio.wait_for(main(), 50.0))
    log = (path / "master.log").read_text()
    assert "Traceback" not in log, log
    assert "never retrieved" not in log, log


@contextlib.asynccontextmanager
async def nodes(master: MasterProcess, count: int) -> Any:
    """Simulated agents, all in the first round's world, and the client that they share."""
    async with master.client() as client:
        agents = [SimulatedAgent(client, nproc=2) for _ in range(count)]
        lives = [asyncio.create_task(agent.run()) for agent in agents]
        for agent in agents:
            await agent.running()
        try:
            yield agents, client
        finally:
            for life in lives:
                life.cancel()
            await asyncio.gather(*lives, return_exceptions=True)


async def status_when(
    client: MasterClient, condition: Callable[[messages.Status], bool]
) -> messages.Status:
    """The first status for which a condition holds; the test's time-out is the limit."""
    while True:
        with contextlib.suppress(InfrastructureError):
            status = await client.status()
            if condition(status):
                return status
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("seconds", [3600, -3600])
def test_a_clock_that_is_set_while_the_master_is_away_is_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """Nor does it let deadlines pass: what the job's time is made of is how long it took."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import time\nwall = time.time\ntime.time = lambda: wall() + {seconds}\n"
    )

    async def event(master: MasterProcess, kind: type) -> float:
        async with master.client() as client:
            async for notice in client.watch():
                for one in notice.events:
                    if isinstance(one.body, kind):
                        return one.time
        raise AssertionError(kind)

    async def test(master: MasterProcess) -> None:
        began = await event(master, events.JobSubmitted)
        master.kill()
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
        await master.start()
        assert 0 < await event(master, events.MasterRecovered) - began < 60

    (tmp_path / "job").mkdir()
    run(tmp_path / "job", test)


def all_connected(status: messages.Status) -> bool:
    return all(node.connected for node in status.nodes if node.status == "running")


def rss(master: MasterProcess) -> float:
    """Resident memory of the master, in MiB."""
    return psutil.Process(master.pid).memory_info().rss / MIB


def numbers(master: MasterProcess) -> list[int]:
    return [event.seq for event in history.read(master.job_dir.events)]


# ---- killed and started again


def test_a_killed_master_comes_back_with_the_same_status(tmp_path: Path) -> None:
    async def test(master: MasterProcess) -> None:
        async with nodes(master, 4) as (agents, client):
            agents[0].report(3)
            agents[3].fail()
            for agent in agents:
                await agent.running(2)
                agent.report(7)
            before = await status_when(client, lambda s: sum(n.steps for n in s.nodes) == 28)
            rounds = [agent.world for agent in agents]
            master.kill()
            with pytest.raises(InfrastructureError, match="cannot be reached"):
                await client.stop("nobody listens", 1)
            await master.start()
            async with master.client() as fresh:
                await fresh.status()
            after = await status_when(
                client, lambda s: all_connected(s) and sum(n.steps for n in s.nodes) == 28
            )
            timeless = {"seconds": 0.0, "rate": 0.0}  # a new master has seen no step being made
            assert msgspec.structs.replace(after, **timeless) == msgspec.structs.replace(
                before, **timeless
            )
            assert [agent.world for agent in agents] == rounds
            assert numbers(master) == list(range(1, numbers(master)[-1] + 1))

    run(
        tmp_path,
        test,
        {"heartbeat_interval": 0.1, "recovery_grace": 20.0},
        min_nodes=4,
        max_nodes=4,
        max_restarts=1,
    )


def test_a_job_survives_masters_killed_at_any_instant(tmp_path: Path) -> None:
    chance = random.Random(20)
    kills = 8

    async def test(master: MasterProcess) -> None:
        async with nodes(master, 6) as (agents, _):
            for round_ in range(1, kills + 1):
                agents[0].report(round_)
                agents[round_ % 6].fail()
                await asyncio.sleep(chance.uniform(0.0, 0.02))  # the round takes about so long
                master.kill()
                await master.start()
                for agent in agents:
                    await agent.running(round_ + 1)
            for agent in agents:
                agent.succeed()
            for agent in agents:
                await agent.until(lambda a: a.outcome is not None)
            assert {agent.outcome.exit_code for agent in agents} == {0}
        assert await asyncio.to_thread(master.process.wait, 20) == 0
        stored = history.read(master.job_dir.events)
        assert [e.seq for e in stored] == list(range(1, len(stored) + 1))
        kinds = [type(event.body) for event in stored]
        assert kinds.count(events.WorkerFailed) == kills
        assert kinds.count(events.RestartDecided) == kills
        assert kinds.count(events.MasterRecovered) == kills
        assert kinds.count(events.JobEnded) == 1
        assert kinds.count(events.NodeLost) == 0

    # A step that only the killed master knew is not known: no count of restarts without one may end the job.
    limits = {"recovery_grace": 20.0, "reconnect_grace": 20.0, "no_progress_restarts": kills}
    run(tmp_path, test, limits, min_nodes=6, max_nodes=6, max_restarts=kills)


def test_nodes_that_are_away_when_the_job_ends_still_learn_of_it(tmp_path: Path) -> None:
    async def test(master: MasterProcess) -> None:
        async with master.client() as client:
            agents = [SimulatedAgent(client) for _ in range(2)]
            lives = [asyncio.create_task(agent.run()) for agent in agents]
            for agent in agents:
                await agent.running()
            for life in lives:
                life.cancel()
            await status_when(client, lambda s: not any(n.connected for n in s.nodes))
            await client.stop("enough", 5)
            outcomes = [await agent.run() for agent in agents]
            assert {outcome.exit_code for outcome in outcomes} == {5}
        assert await asyncio.to_thread(master.process.wait, 20) == 5

    run(tmp_path, test, {"recovery_grace": 2.0}, min_nodes=2, max_nodes=2)


def test_a_master_killed_at_the_end_dismisses_its_nodes_when_it_is_back(tmp_path: Path) -> None:
    async def test(master: MasterProcess) -> None:
        async with nodes(master, 2) as (agents, _):
            master.signal(signal.SIGSTOP)
            for agent in agents:
                agent.succeed()
            master.signal(signal.SIGCONT)
            while not any(isinstance(e.body, events.JobEnded) for e in stored(master)):
                await asyncio.sleep(0)
            master.kill()
            await master.start()
            for agent in agents:
                await agent.until(lambda a: a.outcome is not None)
                assert agent.outcome.exit_code == 0
            assert await asyncio.to_thread(master.process.wait, 20) == 0

    def stored(master: MasterProcess) -> list[events.Event]:
        return history.read(master.job_dir.events)

    run(tmp_path, test, {"recovery_grace": 2.0}, min_nodes=2, max_nodes=2)


# ---- stopped


def test_a_stopped_master_keeps_nobody_waiting_and_loses_nobody(tmp_path: Path) -> None:
    timeout = 0.4

    async def test(master: MasterProcess) -> None:
        async with nodes(master, 3) as (agents, client):
            master.signal(signal.SIGSTOP)
            address = master.address
            async with MasterClient(address, master.token, timeout=4 * timeout) as impatient:
                began = time.monotonic()
                with pytest.raises(InfrastructureError, match="cannot be reached"):
                    await impatient.status()
                waited = time.monotonic() - began
            master.signal(signal.SIGCONT)
            assert 4 * timeout <= waited < 4 * timeout + 2.0
            # The nodes' heartbeats of that time are still to be read: none of them was silent.
            async with contextlib.aclosing(client.watch(follow=True)) as notices:
                until = time.monotonic() + 4 * timeout
                async for notice in notices:
                    assert not [e for e in notice.events if isinstance(e.body, events.NodeLost)]
                    assert notice.status.round == 1
                    if time.monotonic() > until:
                        break
            agents[0].silent = True
            await status_when(client, lambda s: s.round > 1)

    run(
        tmp_path,
        test,
        {"heartbeat_interval": timeout / 10, "heartbeat_timeout": timeout},
        min_nodes=1,
        max_nodes=3,
    )


def test_a_node_that_came_back_while_the_master_was_stopped_is_not_lost(tmp_path: Path) -> None:
    grace = 1.0

    async def test(master: MasterProcess) -> None:
        async with nodes(master, 2) as (_, client), master.client() as own:
            away = SimulatedAgent(own)
            life = asyncio.create_task(away.run())
            world = await away.running(2)
            life.cancel()
            await status_when(client, lambda s: not s.nodes[2].connected)
            master.signal(signal.SIGSTOP)
            life = asyncio.create_task(away.run())
            await asyncio.sleep(grace + STALLED + 0.5)
            master.signal(signal.SIGCONT)
            status = await status_when(client, all_connected)
            assert (status.round, len(status.nodes)) == (2, 3)
            assert away.world == world
            life.cancel()

    run(tmp_path, test, {"reconnect_grace": grace, "last_call_timeout": 0.2}, max_nodes=3)


# ---- fed with nonsense


def header(name: str, value: str) -> bytes:
    """An HTTP/2 header, without compression."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """An HTTP/2 frame."""
    size = struct.pack(">I", len(payload))[1:]
    return size + bytes([kind, flags]) + struct.pack(">I", stream) + payload


DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 7, 8


class Flood:
    """A call by hand, whose only message says that it has ``declared`` bytes."""

    def __init__(self, address: str, method: str, token: str) -> None:
        host, _, port = address.partition(":")
        self.sock = socket.create_connection((host, int(port)), timeout=10.0)
        self.windows = {0: 65535, 1: 65535}
        self.received = b""
        self.ended = False
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": f"/{wire.SERVICE}/{method}",
            ":authority": address,
            "te": "trailers",
            "content-type": "application/grpc",
            wire.TOKEN_KEY: token,
        }
        block = b"".join(header(name, value) for name, value in fields.items())
        self.sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b""))
        self.sock.sendall(frame(HEADERS, 0x4, 1, block))

    def send(self, declared: int) -> int:
        """Send the message until the server ends the call; how many bytes it took."""
        sent = 0
        data = b"\0" + struct.pack(">I", declared) + bytes(16384 - 5)
        while sent < declared and not self.ended:
            if min(self.windows.values()) < len(data):
                self._receive()
                continue
            self.sock.sendall(frame(DATA, 0, 1, data))
            sent += len(data)
            for stream in self.windows:
                self.windows[stream] -= len(data)
            data = bytes(16384)
        self.sock.close()
        return sent

    def _receive(self) -> None:
        data = self.sock.recv(65536)
        self.ended |= not data
        self.received += data
        while len(self.received) >= 9:
            size = int.from_bytes(self.received[:3], "big")
            if len(self.received) < 9 + size:
                return
            kind, flags = self.received[3], self.received[4]
            stream = int.from_bytes(self.received[5:9], "big")
            self._take(kind, flags, stream, self.received[9 : 9 + size])
            self.received = self.received[9 + size :]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE:
            self.windows[stream] += int.from_bytes(payload, "big")
        elif kind == SETTINGS and not flags & 0x1:
            settings = dict(struct.iter_unpack(">HI", payload))
            self.windows[1] += settings.get(4, 65535) - 65535  # the initial window of a stream
            self.sock.sendall(frame(SETTINGS, 0x1, 0, b""))
        elif kind in (RST_STREAM, GOAWAY) or (kind == HEADERS and flags & 0x1):
            self.ended = True


@pytest.mark.parametrize("method", ["Scale", "Watch", "Attend"])
def test_a_message_of_a_gibibyte_costs_no_memory(tmp_path: Path, method: str) -> None:
    async def test(master: MasterProcess) -> None:
        async with master.client() as client:
            await client.status()
            before = rss(master)
            for token in (master.token, "wrong"):
                flood = Flood(master.address, method, token)
                sent = await asyncio.to_thread(flood.send, 1024 * MIB)
                assert sent <= 2 * wire.MAX_MESSAGE_BYTES
            assert rss(master) - before < 32
            await client.status()

    run(tmp_path, test)


def test_a_small_message_that_unpacks_to_a_large_one_costs_no_memory(tmp_path: Path) -> None:
    async def test(master: MasterProcess) -> None:
        async with (
            master.client() as client,
            grpc.aio.insecure_channel(
                master.address, options=[("grpc.max_send_message_length", -1)]
            ) as channel,
        ):
            await client.status()
            call = channel.unary_unary(f"/{wire.SERVICE}/Scale")(
                bytes(128 * MIB),
                metadata=((wire.TOKEN_KEY, master.token),),
                compression=grpc.Compression.Gzip,
            )
            before = peak = rss(master)
            code = asyncio.ensure_future(call.code())
            while not code.done():
                await asyncio.sleep(0.001)
                peak = max(peak, rss(master))
            assert (await code).name == "RESOURCE_EXHAUSTED"
            assert peak - before < 32
            await client.status()

    run(tmp_path, test)


def test_strangers_are_turned_away_and_the_job_goes_on(tmp_path: Path) -> None:
    async def test(master: MasterProcess) -> None:
        host, _, port = master.address.partition(":")
        chance = random.Random(20)
        async with nodes(master, 2) as (agents, client):
            before = rss(master)
            strangers = []
            for number in range(200):
                _, writer = await asyncio.open_connection(host, int(port))
                strangers.append(writer)
                junk = chance.randbytes(chance.randrange(4096))
                http = b"GET /metrics HTTP/1.1\r\nHost: master\r\n\r\n"
                writer.write(
                    [b"", junk, http, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + junk][number % 4]
                )
            async with MasterClient(master.address, "guess") as stranger:
                for _ in range(200):
                    with pytest.raises(ConfigurationError, match="The token"):
                        await stranger.stop("now", 0)
            agents[0].report(1)
            agents[0].fail()
            for agent in agents:
                await agent.running(2)  # while they hold their connections
            for writer in strangers:
                writer.transport.abort()
            assert (await client.status()).phase == "running"
            assert rss(master) - before < 32

    run(tmp_path, test, min_nodes=2, max_nodes=2, max_restarts=1)


# ---- flooded


def test_thousands_of_failure_reports_are_taken_while_others_are_served(tmp_path: Path) -> None:
    workers = 2000
    text = "x" * 16_384

    async def test(master: MasterProcess) -> None:
        async with nodes(master, 4) as (agents, client):
            agents[0].report(1)
            await client.status()
            before = rss(master)
            reports = [agents[i % 4].failure(traceback=text) for i in range(workers)]
            for number, failure in enumerate(reports):
                for _ in range(2):  # as after a reconnection
                    agents[number % 4]._say(messages.Failed(failure))
            agents[0].fail(reports[0])
            waits = []
            async with master.client() as other:
                for _ in range(20):
                    began = time.monotonic()
                    await other.ranks()
                    waits.append(time.monotonic() - began)
            for agent in agents:
                agent.fail()
                await agent.running(2)
            assert max(waits) < 5.0
            failed = [
                event
                for event in history.read(master.job_dir.events)
                if isinstance(event.body, events.WorkerFailed)
            ]
            assert workers <= len(failed) <= workers + 4
            # One copy of each text, and no more than that.
            assert rss(master) - before < 2 * workers * len(text) / MIB + 64

    run(tmp_path, test, min_nodes=4, max_nodes=4, max_restarts=1)


# ---- the benchmark


def test_the_load_benchmark_runs(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    command = [sys.executable, str(BENCHMARK), "--quick", "--json", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=55)
    assert (done.returncode, done.stderr) == (0, "")
    results = json.loads(path.read_text())
    assert {"machine", "saturation", "rendezvous", "steady", "ratios"} <= set(results)
    assert all(row["messages_per_s"] > 0 for row in results["saturation"].values())
    assert results["steady"]["master_restart"]["round_after"] == 1
