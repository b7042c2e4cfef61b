"""What dealing a data set costs: shards a second of one master, a slow worker, and the training's throughput.

The master runs on the first core, everything else on the second. Requests to a bare grpc.aio server, on the
same core in the same run, show what the transport alone costs. ``benchmarks/README.md`` explains every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import bare_grpc
import grpc.aio
import torch
from bare_grpc import GENERATOR_CORE, SERVER_CORE, Meter, Row, pin
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrover import launched
from dlrover.data.dataset import ElasticDataset
from dlrover.data.records import Records
from dlrover.rpc import wire
from dlrover.rpc.batches import RequestBatcher, RequestRelay
from dlrover.rpc.client import MasterClient
from dlrover.spec.job import JobSpec
from dlrover.spec.requests.shards import (
    DataSpec,
    Incarnation,
    OpenShards,
    ShardReply,
    Span,
    TakeShards,
)
from tests.support.masters import MasterProcess

UPSTREAM_SHARDS = 2400.0
"""Shards per second of upstream's master (0.6.1) on one core of a machine of this kind."""
LEASE = 10
"""Shards of one request."""
WORKERS = 16
AGENTS = 2
"""Agents that the workers of the flood have: eight workers each, as on a usual node."""
SLOWDOWN = 3.0
BATCH = 10
TURN = 10
"""Batches that one training makes before the other one goes on."""


@contextlib.asynccontextmanager
async def a_master() -> Any:
    """A master on the server core."""
    with tempfile.TemporaryDirectory() as directory:
        async with MasterProcess(Path(directory), JobSpec(name="load")) as master:
            pin(master.pid, SERVER_CORE)
            yield master


# ---- as fast as possible


async def worker(agent: RequestBatcher, name: str, until: float) -> tuple[int, int]:
    """Report a lease as done and take the next, in a closed loop; requests and shards."""
    spec = DataSpec(name="data", size=10**12, shard=100)
    await agent.ask(wire.encode(OpenShards(spec, name, Incarnation(1))))
    done: tuple[Span, ...] = ()
    requests = shards = 0
    while time.perf_counter() < until:
        request = TakeShards("data", name, Incarnation(1), requests, 0, LEASE, done)
        reply = wire.decode(await agent.ask(wire.encode(request)), ShardReply)
        done = reply.spans
        requests += 1
        shards += sum(span.stop - span.start for span in done) // spec.shard
    return requests, shards


async def flood(seconds: float, agents: int = AGENTS) -> Row:
    """Requests of many workers, by way of their agents' connections, beside as many to a bare server."""
    request = wire.encode(
        TakeShards(
            "data",
            "0-0123456789ab",
            Incarnation(1),
            1000,
            0,
            LEASE,
            (Span(0, 10**6, 10**6 + 1000),),
        )
    )
    with bare_grpc.bare_server() as (pid, address):
        async with grpc.aio.insecure_channel(address) as channel:
            with Meter(pid) as bare:
                method = f"/{bare_grpc.SERVICE}/Unary"
                echoed = await bare_grpc.flood_unary(channel, method, request, seconds)
    async with a_master() as master, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(master.client()) for _ in range(agents)]
        asking = [client.requests() for client in clients]
        until = time.perf_counter() + seconds
        with Meter(master.pid) as meter:
            counts = await asyncio.gather(
                *(
                    worker(asking[number % agents], f"{number}-0123456789ab", until)
                    for number in range(WORKERS)
                )
            )
    requests, shards = (sum(column) for column in zip(*counts, strict=True))
    return {
        "bare_requests_per_second": echoed / bare.wall,
        "bare_us_of_cpu": 1e6 * bare.cpu / echoed,
        "requests_per_second": requests / meter.wall,
        "us_of_cpu": 1e6 * meter.cpu / requests,
        "shards_per_second": shards / meter.wall,
        "shards_per_cpu_second": shards / meter.cpu,
        "cpu_to_bare": (meter.cpu / requests) / (bare.cpu / echoed),
        "times_upstream": shards / meter.wall / UPSTREAM_SHARDS,
    }


# ---- one slow worker


@contextlib.asynccontextmanager
async def relayed() -> Any:
    """Workers in this process ask a real master by way of a relay, which an agent has in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    mine, other = spawn.Pipe()
    async with a_master() as master:
        agent = spawn.Process(target=relay, args=(master.address, master.token, other), daemon=True)
        agent.start()
        address = await asyncio.to_thread(mine.recv)
        launched.given = launched.Given(relay=address, round=1)
        try:
            yield
        finally:
            launched.given = launched.Given()
            agent.kill()
            agent.join()


def relay(address: str, token: str, told: Connection) -> None:
    """Relay on the server core until killed; ``told`` gets the address."""

    async def serve() -> None:
        async with (
            MasterClient(address, token) as client,
            RequestRelay(client.requests()) as served,
        ):
            told.send(served.address)
            await asyncio.Event().wait()

    pin(os.getpid(), SERVER_CORE)
    asyncio.run(serve())


def train(data: Records[int], per_sample: float, counts: list[int]) -> None:
    """Wait as long as batches would take."""
    pause = threading.Event()
    count = 0
    for count, _ in enumerate(data, 1):
        if count % BATCH == 0:
            pause.wait(BATCH * per_sample)
    counts.append(count)


async def slowed(seconds: float, per_sample: float = 2e-3, workers: int = 4) -> Row:
    """Workers of which one is slow; the time beside the best that there is."""
    speeds = [1 / SLOWDOWN, *[1.0] * (workers - 1)]
    size = int(seconds * sum(speeds) / per_sample)
    async with relayed():
        sets = [Records(range(size), shard=BATCH) for _ in speeds]
        counts: list[int] = []
        began = time.perf_counter()
        await asyncio.gather(
            *(
                asyncio.to_thread(train, data, per_sample / speed, counts)
                for data, speed in zip(sets, speeds, strict=True)
            )
        )
        took = time.perf_counter() - began
        for data in sets:
            await asyncio.to_thread(data.close)
    assert sum(counts) == size
    ideal = size * per_sample / sum(speeds)
    static = size / workers * per_sample * SLOWDOWN
    return {
        "seconds": took,
        "ideal": ideal,
        "to_ideal": took / ideal,
        "static_to_ideal": static / ideal,
    }


# ---- throughput


class Rows:
    """The rows of a tensor as a map-style data set."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


class Trained:
    """A training's samples, and the seconds that it took."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self.batches, self.samples, self.seconds = batches, 0, 0.0

    def go_on(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Train on `TURN` batches; whether there were as many."""
        began, count = time.perf_counter(), 0
        for batch in itertools.islice(self.batches, TURN):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            self.samples += len(batch)
            count += 1
        self.seconds += time.perf_counter() - began
        return count == TURN


def in_turns(
    static: Trained,
    dealt: Trained,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    dealt_first: bool,
) -> None:
    """Train with both to their ends, in turns: whatever else the machine does meets both.

    Who comes second is up to a hundredth slower, with two static samplers too: let each be first as often.
    What this process does for dealing in the turns of the static sampler is dealing's time, too.
    """
    more = True
    while more:
        more = False
        for trained in (dealt, static) if dealt_first else (static, dealt):
            beside = time.process_time() - time.thread_time()
            more |= trained.go_on(model, optimizer)
            beside = time.process_time() - time.thread_time() - beside
            if trained is static:
                static.seconds -= beside
                dealt.seconds += beside


async def throughput(rounds: int, size: int = 51200, batch: int = 64) -> Row:
    """A training with dealt samples beside one with a static sampler, on one core, from the first sample on."""
    torch.manual_seed(0)
    rows = torch.randn(size, 256)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 256)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    speeds = []

    def both(number: int) -> None:
        static = Trained(iter(DataLoader(Rows(rows), batch_size=batch, shuffle=True)))
        data = ElasticDataset(Rows(rows), name=f"data-{number}", shuffle=True)
        dealt = Trained(iter(data.loader(batch)))
        in_turns(static, dealt, model, optimizer, dealt_first=number % 2 == 0)
        data.close()
        assert static.samples == dealt.samples == size
        speeds.append((size / static.seconds, size / dealt.seconds))

    async with relayed():
        for number in range(rounds + 1):
            await asyncio.to_thread(both, number)
    del speeds[0]  # to warm up
    return {
        "static_samples_per_second": statistics.median(static for static, _ in speeds),
        "samples_per_second": statistics.median(dealt for _, dealt in speeds),
        "to_static": statistics.median(dealt / static for static, dealt in speeds),
    }


# ---- all of it


async def run(args: argparse.Namespace) -> dict[str, Row]:
    """Measure and print."""
    dealing = await flood(args.seconds)
    print(
        f"{dealing['shards_per_second']:.0f} shards/s in leases of {LEASE}: "
        f"{dealing['requests_per_second']:.0f} requests/s, {dealing['us_of_cpu']:.0f} us of CPU each; bare "
        f"{dealing['bare_requests_per_second']:.0f}/s, {dealing['bare_us_of_cpu']:.0f} us "
        f"({dealing['cpu_to_bare']:.2f} times); {dealing['times_upstream']:.0f} times upstream"
    )
    slow = await slowed(args.slow_seconds)
    print(
        f"one of four workers {SLOWDOWN:g} times as slow: {slow['seconds']:.1f} s, "
        f"{slow['to_ideal']:.3f} of the ideal split; static: {slow['static_to_ideal']:.2f}"
    )
    speed = await throughput(args.rounds)
    print(f"training throughput: {speed['to_static']:.3f} of a static sampler's")
    return {"dealing": dealing, "slow_worker": slow, "throughput": speed}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="Length of each flood.")
    parser.add_argument("--slow-seconds", type=float, default=30.0, help="Of the ideal split.")
    parser.add_argument("--rounds", type=int, default=10, help="Pairs of trainings.")
    parser.add_argument("--json", type=Path, help="Where to write the results.")
    args = parser.parse_args(argv)
    pin(os.getpid(), GENERATOR_CORE)
    torch.set_num_threads(1)
    results = asyncio.run(run(args))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
