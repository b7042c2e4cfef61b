"""What one job's master carries: thousands of agents over the real wire, on one core.

The master runs on the first core, this load generator on the second. Simulated agents speak the real
protocol and start no workers. Bare grpc.aio servers, on the same core in the same run, show what the
transport alone costs. ``benchmarks/README.md`` explains every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, final

import bare_grpc
import grpc.aio
import psutil
from bare_grpc import GENERATOR_CORE, SERVER_CORE, Meter, Row, pin

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrover.errors import InfrastructureError
from dlrover.rpc import messages, wire
from dlrover.rpc.client import MasterClient
from dlrover.spec.job import JobSpec, Limits
from dlrover.spec.world import Offer
from tests.support.agents import SimulatedAgent
from tests.support.masters import MasterProcess

UPSTREAM_CORE_SECONDS = {1000: 0.97, 2000: 1.9, 4000: 6.2, 8000: 28.4}
"""CPU seconds of upstream's master (0.6.1) for one rendezvous, measured on a machine of this kind."""
UPSTREAM_HEARTBEATS = 6200.0
"""Heartbeats per second of upstream's master on one core of that machine."""
PROBE_INTERVAL = 0.05
STREAM_PROBE_INTERVAL = 0.2
SHARED_CONNECTIONS = 10


@contextlib.asynccontextmanager
async def master_of(nodes: int, **limits: float) -> AsyncIterator[MasterProcess]:
    """A master on the server core for a job of ``nodes`` nodes."""
    job = JobSpec(
        name="load", min_nodes=nodes, max_nodes=nodes, max_restarts=10, limits=Limits(**limits)
    )
    with tempfile.TemporaryDirectory() as directory:
        async with MasterProcess(Path(directory), job) as master:
            pin(master.pid, SERVER_CORE)
            yield master


# ---- saturation


async def attending(channel: grpc.aio.Channel) -> list[Any]:
    """Open streams of agents whose world is formed."""
    method = channel.stream_stream(f"/{wire.SERVICE}/Attend")
    streams = [method(metadata=((wire.TOKEN_KEY, "simulated"),)) for _ in range(bare_grpc.STREAMS)]
    for number, stream in enumerate(streams):
        await stream.write(wire.encode(messages.Hello(f"uid-{number}")))
        await stream.read()
        await stream.write(wire.encode(messages.Join(1, Offer(8, "127.0.0.1", 1))))
    for stream in streams:
        await stream.read()
    return streams


async def saturation(seconds: float) -> Row:
    """The master's methods beside the same traffic to bare grpc.aio."""
    heartbeat = wire.encode(messages.Heartbeat(1, 1000))
    refused = wire.encode(messages.DrainRequest(-1, "probe"))
    rows: Row = {}
    with bare_grpc.bare_server() as (pid, address):
        async with grpc.aio.insecure_channel(address) as channel:
            path = f"/{bare_grpc.SERVICE}"
            rows["bare unary echo"] = await bare_grpc.measured(
                pid, bare_grpc.flood_unary(channel, f"{path}/Unary", refused, seconds)
            )
            rows["bare stream echo"] = await bare_grpc.measured(
                pid, bare_grpc.flood_echo(channel, f"{path}/Echo", heartbeat, seconds)
            )
            sinks = [channel.stream_stream(f"{path}/Sink")() for _ in range(bare_grpc.STREAMS)]
            rows["bare stream sink"] = await bare_grpc.measured(
                pid, bare_grpc.flood_sink(sinks, heartbeat, seconds)
            )
    async with (
        master_of(bare_grpc.STREAMS, reconnect_grace=60) as master,
        grpc.aio.insecure_channel(master.address) as channel,
    ):
        rows["master unary (drain)"] = await bare_grpc.measured(
            master.pid, bare_grpc.flood_unary(channel, f"/{wire.SERVICE}/Drain", refused, seconds)
        )
        streams = await attending(channel)
        rows["master heartbeats"] = await bare_grpc.measured(
            master.pid, bare_grpc.flood_sink(streams, heartbeat, seconds)
        )
    return rows


# ---- many agents


@final
class Fleet:
    """Simulated agents that share some connections to one master."""

    def __init__(self, master: MasterProcess, nodes: int, connections: int) -> None:
        self.clients = [master.client() for _ in range(min(connections, nodes))]
        self.agents = [
            SimulatedAgent(self.clients[i % len(self.clients)], nproc=8, phase=i / nodes)
            for i in range(nodes)
        ]
        self._lives: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Fleet:
        self._lives = [asyncio.create_task(agent.run()) for agent in self.agents]
        return self

    async def __aexit__(self, *exc: object) -> None:
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        for client in self.clients:
            await client.close()

    async def all(self, condition: Callable[[SimulatedAgent], bool]) -> None:
        """Wait until a condition holds for every agent."""
        for agent in self.agents:
            await agent.until(condition)


async def rendezvous(nodes: int, connections: int) -> Row:
    """One job's life without steps: first round, a failure and the next round, the end."""
    async with master_of(nodes) as master:
        with Meter(master.pid) as first:
            fleet = await Fleet(master, nodes, connections).__aenter__()
            await fleet.all(lambda a: a.machine.running_round == 1)
        rss = first.rss_mib()
        with Meter(master.pid) as second:
            fleet.agents[0].report(1)
            fleet.agents[0].fail()
            await fleet.all(lambda a: a.machine.running_round == 2)
        with Meter(master.pid) as end:
            for agent in fleet.agents:
                agent.succeed()
            await fleet.all(lambda a: a.outcome is not None)
        await fleet.__aexit__()
    row = {"nodes": nodes, "connections": len(fleet.clients), "master_rss_mib": rss}
    for name, meter in (("first_round", first), ("restart_round", second), ("end", end)):
        row[f"{name}_s"] = round(meter.wall, 2)
        row[f"{name}_cpu_s"] = round(meter.cpu, 2)
    row["first_round_cpu_us_per_node"] = round(1e6 * first.cpu / nodes)
    return row


async def steady(nodes: int, connections: int, seconds: float) -> Row:
    """All agents report every 15 s; probes beside them. Then the master is killed and comes back."""
    async with master_of(nodes, heartbeat_interval=15.0) as master:
        probe = master.client()
        idle = await probe_unary(probe, 2.0)
        async with Fleet(master, nodes, connections) as fleet:
            await fleet.all(lambda a: a.machine.running_round == 1)
            for agent in fleet.agents:
                agent.steps = 1000
            await asyncio.sleep(2.0)  # let the rendezvous settle
            row: Row = {"nodes": nodes, "connections": len(fleet.clients), "seconds": seconds}
            row["heartbeats_per_s"] = round(nodes / 15)
            row["probe_unary_idle_ms"] = quantiles(idle)
            with Meter(master.pid) as meter:
                unary, stream = await asyncio.gather(
                    probe_unary(probe, seconds), probe_stream(probe, seconds)
                )
            row["master_cpu_percent"] = round(100 * meter.cpu / meter.wall, 1)
            row["master_rss_mib"] = meter.rss_mib()
            row["probe_unary_ms"] = quantiles(unary)
            row["probe_stream_open_ms"] = quantiles(stream)
            row["with_watcher"] = await with_watcher(master, probe, seconds / 3)
            row["status"] = await timed_status(master.pid, probe)
            row["master_restart"] = await restart(master, fleet)
        await probe.close()
    return row


async def probe_unary(client: MasterClient, seconds: float) -> list[float]:
    """Latencies of small requests sent at a low rate."""
    return await repeat(lambda: client.drain(-1, "probe"), PROBE_INTERVAL, seconds)


async def probe_stream(client: MasterClient, seconds: float) -> list[float]:
    """Latencies from a stream's Hello to its Welcome: stream, journal, machine and back."""

    async def hello() -> AsyncIterator[messages.AgentMessage]:
        yield messages.Hello("probe", hostname="probe")
        await asyncio.Event().wait()

    async def once() -> None:
        async with contextlib.aclosing(client.attend(hello())) as incoming:
            await anext(incoming)

    return await repeat(once, STREAM_PROBE_INTERVAL, seconds)


async def repeat(
    action: Callable[[], Awaitable[object]], interval: float, seconds: float
) -> list[float]:
    """Latencies of an action that is begun every ``interval`` seconds, late ones included."""
    latencies = []
    due = time.perf_counter()
    until = due + seconds
    while due < until:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        await action()
        latencies.append(time.perf_counter() - due)
        due += interval
    return latencies


def quantiles(latencies: Sequence[float]) -> Row:
    """p50, p99 and the maximum, in milliseconds."""
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    found = {"p50": cuts[49], "p99": cuts[98], "max": max(latencies)}
    return {name: round(1000 * value, 2) for name, value in found.items()}


async def with_watcher(master: MasterProcess, probe: MasterClient, seconds: float) -> Row:
    """The same probes while somebody follows the job's events and status."""

    async def follow() -> None:
        async with master.client() as client:
            async for _ in client.watch(follow=True):
                pass

    following = asyncio.create_task(follow())
    with Meter(master.pid) as meter:
        latencies = await probe_unary(probe, seconds)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    percent = round(100 * meter.cpu / meter.wall, 1)
    return {"master_cpu_percent": percent, "probe_unary_ms": quantiles(latencies)}


async def timed_status(pid: int, client: MasterClient) -> Row:
    """One status of the whole job."""
    with Meter(pid) as meter:
        status = await client.status()
    return {"bytes": len(wire.encode(status)), "ms": round(1000 * meter.wall, 1)}


async def restart(master: MasterProcess, fleet: Fleet) -> Row:
    """SIGKILL the master and start another one in its place."""
    await asyncio.get_running_loop().run_in_executor(None, master.kill)
    began = time.perf_counter()
    await master.start()
    pin(master.pid, SERVER_CORE)
    used = psutil.Process(master.pid)
    async with master.client() as client:
        await client.drain(-1, "probe")
        answered = time.perf_counter() - began
        connected = round_ = 0
        while connected < len(fleet.agents):
            await asyncio.sleep(0.5)
            with contextlib.suppress(InfrastructureError):  # no answer in time
                status = await client.status()
                connected = sum(node.connected for node in status.nodes)
                round_ = status.round
    return {
        "first_answer_s": round(answered, 2),
        "all_nodes_back_s": round(time.perf_counter() - began, 2),
        "master_cpu_s": round(sum(used.cpu_times()[:2]), 2),
        "round_after": round_,
    }


# ---- the report


def machine() -> Row:
    """What the figures were measured on."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "grpcio": metadata.version("grpcio"),
        "msgspec": metadata.version("msgspec"),
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "load_average_before": os.getloadavg()[0],
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def ratios(results: Row) -> Row:
    """What the figures mean beside bare gRPC and upstream's master."""
    flood = results["saturation"]
    cost = {name: row["server_us_per_message"] for name, row in flood.items()}
    found = {
        "unary: cost / bare grpc.aio unary": cost["master unary (drain)"] / cost["bare unary echo"],
        "heartbeat: cost / bare grpc.aio stream sink": cost["master heartbeats"]
        / cost["bare stream sink"],
        "heartbeat: cost / bare grpc.aio stream echo": cost["master heartbeats"]
        / cost["bare stream echo"],
        "heartbeats per core: ours / upstream": flood["master heartbeats"]["messages_per_core_s"]
        / UPSTREAM_HEARTBEATS,
    }
    for section in ("rendezvous", "rendezvous, shared connections"):
        rounds = results[section]
        for row in rounds:
            upstream = UPSTREAM_CORE_SECONDS.get(row["nodes"])
            if upstream is not None:
                name = f"{section} of {row['nodes']}: core-seconds, upstream / ours"
                found[name] = upstream / row["first_round_cpu_s"]
        smallest = rounds[0]["first_round_cpu_us_per_node"]
        if smallest:  # a few nodes may take less than the clock of the kernel tells
            found[f"{section}: CPU per node, largest / smallest (1: linear)"] = (
                rounds[-1]["first_round_cpu_us_per_node"] / smallest
            )
    return {name: round(value, 2) for name, value in found.items()}


def show(title: str, row: Row) -> None:
    """Print one section."""
    print(f"\n{title}")
    for name, value in row.items():
        print(f"  {name:72} {value}")


async def run(args: argparse.Namespace) -> Row:
    """All sections; what they found."""
    results: Row = {"machine": machine()}
    show("machine", results["machine"])
    results["saturation"] = await saturation(args.flood_seconds)
    show("saturation (one core)", results["saturation"])
    results["steady"] = await steady(args.agents, args.connections, args.seconds)
    show("steady load", results["steady"])
    for section, connections in (
        ("rendezvous", args.connections),
        ("rendezvous, shared connections", SHARED_CONNECTIONS),
    ):
        results[section] = []
        for nodes in args.sizes:
            row = await rendezvous(nodes, connections)
            gc.collect()
            show(f"{section}: {nodes} nodes", row)
            results[section].append(row)
    results["ratios"] = ratios(results)
    show("ratios", results["ratios"])
    return results


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="A smoke test: few agents, seconds.")
    parser.add_argument("--agents", type=int, default=10_000, help="Agents of the steady load.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 4000, 8000, 10_000])
    parser.add_argument(
        "--connections", type=int, default=10_000, help="Connections that the agents share at most."
    )
    parser.add_argument("--seconds", type=float, default=45.0, help="Length of the steady load.")
    parser.add_argument("--flood-seconds", type=float, default=5.0, help="Length of each flood.")
    parser.add_argument("--json", type=Path, help="Where to write the results.")
    args = parser.parse_args(argv)
    if args.quick:
        args.agents, args.sizes, args.connections = 50, [20, 50], 10
        args.seconds, args.flood_seconds = 1.5, 0.2
    pin(os.getpid(), GENERATOR_CORE)
    gc.disable()  # this process's own pauses must not show up as the master's
    results = asyncio.run(run(args))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
