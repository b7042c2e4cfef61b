"""What dealing a data set costs: shards a second of one master, a slow worker, and the training's throughput.

The master runs on the first core, everything else on the second. Requests to a bare grpc.aio server, on the
same core in the same run, show what the transport alone costs. ``benchmarks/README.md`` explains every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bare_grpc
import grpc.aio
import torch
from bare_grpc import GENERATOR_CORE, SERVER_CORE, Meter, Row, pin
from torch.utils.data import DataLoader

from dlrover.agent.relay import Relay
from dlrover.elastic.dataset import ElasticDataset
from dlrover.rpc import wire
from dlrover.sharding import defaults
from dlrover.sharding.records import Records
from dlrover.spec.job import JobSpec
from dlrover.spec.shards import DataSpec, Incarnation, OpenShards, ShardReply, Span, TakeShards
from dlrover.testing.masters import MasterProcess

UPSTREAM_SHARDS = 2400.0
"""Shards per second of upstream's master (0.6.1) on one core of a machine of this kind."""
LEASE = 10
"""Shards of one request."""
WORKERS = 16
SLOWDOWN = 3.0
BATCH = 10
METADATA = ((wire.TOKEN_KEY, "simulated"),)


@contextlib.asynccontextmanager
async def a_master() -> Any:
    """A master on the server core."""
    with tempfile.TemporaryDirectory() as directory:
        async with MasterProcess(Path(directory), JobSpec(name="load")) as master:
            pin(master.pid, SERVER_CORE)
            yield master


# ---- as fast as possible


async def worker(channel: grpc.aio.Channel, name: str, until: float) -> tuple[int, int]:
    """Report a lease as done and take the next, in a closed loop; requests and shards."""
    call = channel.unary_unary(f"/{wire.SERVICE}/Shards")
    spec = DataSpec(name="data", size=10**12, shard=100)
    opened = OpenShards(spec, name, Incarnation(1))
    await call(wire.encode(opened), metadata=METADATA)
    done: tuple[Span, ...] = ()
    requests = shards = 0
    while time.perf_counter() < until:
        request = TakeShards("data", name, Incarnation(1), requests, 0, LEASE, done)
        reply = wire.decode(await call(wire.encode(request), metadata=METADATA), ShardReply)
        done = reply.spans
        requests += 1
        shards += sum(span.stop - span.start for span in done) // spec.shard
    return requests, shards


async def flood(seconds: float) -> Row:
    """Requests of many workers beside as many to a bare server."""
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
    async with a_master() as master, grpc.aio.insecure_channel(master.address) as channel:
        until = time.perf_counter() + seconds
        with Meter(master.pid) as meter:
            counts = await asyncio.gather(
                *(worker(channel, f"{number}-0123456789ab", until) for number in range(WORKERS))
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
    """Workers in this process ask a real master by way of an agent's relay."""
    async with a_master() as master, master.client() as client, Relay(client) as relay:
        defaults.relay, defaults.round = relay.address, 1
        try:
            yield
        finally:
            defaults.relay, defaults.round = "", 0


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


def steps(
    batches: Iterator[Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> float:
    """Samples a second of a training."""
    began, count = time.perf_counter(), 0
    for batch in batches:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        count += len(batch)
    return count / (time.perf_counter() - began)


async def throughput(rounds: int, size: int = 12800, batch: int = 64) -> Row:
    """A training with dealt samples beside one with a static sampler, in turn."""
    torch.manual_seed(0)
    rows = torch.randn(size, 256)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 256)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def with_sampler(_number: int) -> float:
        loader = DataLoader(Rows(rows), batch_size=batch, shuffle=True)
        return steps(iter(loader), model, optimizer)

    def with_dealing(number: int) -> float:
        data = ElasticDataset(Rows(rows), name=f"data-{number}", shuffle=True)
        try:
            return steps(iter(data.loader(batch)), model, optimizer)
        finally:
            data.close()

    static, dealt = [], []
    async with relayed():
        await asyncio.to_thread(with_sampler, 0)  # to warm up
        for number in range(rounds):
            turns = [(static, with_sampler), (dealt, with_dealing)]
            for speeds, train_ in turns if number % 2 else turns[::-1]:
                speeds.append(await asyncio.to_thread(train_, number))
    ratio = statistics.median(b / a for a, b in zip(static, dealt, strict=True))
    return {
        "static_samples_per_second": statistics.median(static),
        "samples_per_second": statistics.median(dealt),
        "to_static": ratio,
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
    parser.add_argument("--rounds", type=int, default=15, help="Pairs of trainings.")
    parser.add_argument("--json", type=Path, help="Where to write the results.")
    args = parser.parse_args(argv)
    pin(os.getpid(), GENERATOR_CORE)
    torch.set_num_threads(1)
    results = asyncio.run(run(args))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
