"""The Brain through its service: how long plans take, and how many reports it commits.

A Brain runs as a process of its own, as in production; this program is its clients. Records are also committed without
a Brain, by the same driver to the same kind of database: a commit with one row waits for the disk as much as any.
``benchmarks/README.md`` explains the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import sqlalchemy as sa

from dlrover.rpc.brain import BrainClient, request_id
from dlrover.spec import brain
from dlrover.spec.plan import NodeGroup

TOKEN = "benchmark"
RESULTS = Path(__file__).parent / "results" / "brain.json"


def shape(workers: int) -> brain.Shape:
    """So many nodes with one accelerator each."""
    return brain.Shape(groups={"worker": NodeGroup(count=workers, cpu=8, accelerators=1)}, batch=64)


def throughput(workers: int, job: int) -> float:
    """Of a made-up job: some scale well, others badly."""
    network = 0.0 if workers == 1 else 0.005 * (1 + job % 7) * (1 + (workers - 2) / workers)
    return workers * 64 / (0.1 + network)


def server_shape(workers: int, servers: int) -> brain.Shape:
    """A parameter-server job."""
    return brain.Shape(
        groups={"worker": NodeGroup(count=workers, cpu=4), "ps": NodeGroup(count=servers, cpu=8)},
        batch=512,
    )


def server_throughput(at: brain.Shape) -> float:
    """Of a made-up job, by DLRover-RM's form."""
    w, p = at.groups["worker"].count, at.groups["ps"].count
    return 512 * w / (0.01 + 0.5e-3 * 512 / 4 + 0.05 * w / (p * 8) + 0.004 * w / p)


class Served(NamedTuple):
    """A Brain that runs."""

    address: str
    process: psutil.Process

    def cpu(self) -> float:
        """Seconds of CPU that it has used."""
        times = self.process.cpu_times()
        return times.user + times.system


@contextlib.contextmanager
def serving(database: str, cpu: int | None) -> Iterator[Served]:
    """A Brain over a database, on one core if ``cpu`` names one."""
    command = [
        sys.executable,
        "-m",
        "dlrover.cli.main",
        "brain",
        "serve",
        "--port",
        "0",
        "-o",
        "json",
    ]
    env = os.environ | {
        "DLROVER_BRAIN_TOKEN": TOKEN,
        "DLROVER_BRAIN_DATABASE": database,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    if cpu is not None:
        os.sched_setaffinity(process.pid, {cpu})
    try:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        yield Served(f"127.0.0.1:{port}", psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait()


def register(job: str, mode: brain.Mode, strategy: brain.Strategy) -> brain.RegisterJob:
    """Its space is that of a large job."""
    space = brain.Space(
        workers=brain.Range(1, 64),
        servers=brain.Range(1, 16),
        worker_cpu=(2, 4, 8, 16),
        server_cpu=(2, 4, 8, 16),
    )
    if strategy == "all-reduce":
        space = brain.Space(workers=brain.Range(1, 64))
    description = brain.Description(
        name=job, mode=mode, strategy=strategy, space=space, total=1e8, features={"model": job}
    )
    return brain.RegisterJob(request=request_id(), job=job, description=description)


def report(job: str, *measured: tuple[brain.Shape, float]) -> brain.ReportSamples:
    """Samples of a job."""
    samples = tuple(brain.Sample(shape=at, throughput=value) for at, value in measured)
    return brain.ReportSamples(request=request_id(), job=job, samples=samples)


def quantiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(seconds)
    return {
        "median_ms": 1000 * ordered[len(ordered) // 2],
        "p99_ms": 1000 * ordered[math.ceil(0.99 * len(ordered)) - 1],
    }


async def plans(client: BrainClient, served: Served, times: int) -> dict[str, Any]:
    """Plans for one job, each after a new sample: the model is fitted anew."""
    found = {}
    for strategy in ("all-reduce", "ps"):
        job, seconds, cpu = f"one-{strategy}", [], 0.0
        await client.report(register(job, "single-job", strategy))  # type: ignore[arg-type]
        for number in range(times):
            workers = (1, 2, 4, 8)[number % 4]
            at = (
                shape(workers)
                if strategy == "all-reduce"
                else server_shape(workers, 1 + workers // 2)
            )
            value = throughput(workers, 1) if strategy == "all-reduce" else server_throughput(at)
            await client.report(report(job, (at, value * (1 + 0.01 * (number % 5)))))
            before, started = served.cpu(), time.perf_counter()
            await client.plan(job, at)
            seconds.append(time.perf_counter() - started)
            cpu += served.cpu() - before
        found[strategy] = quantiles(seconds[4:]) | {"cpu_ms": 1000 * cpu / times}
    return found


async def divide(client: BrainClient, served: Served, count: int) -> dict[str, Any]:
    """Divide a cluster: first with no model fitted yet, then with all of them."""
    capacity = {"accelerator": 8.0, "cpu": 128.0}
    nodes = tuple(brain.ClusterNode(name=f"m{n}", capacity=capacity) for n in range(count))
    await client.report(brain.ReportCluster(request=request_id(), nodes=nodes))
    for start in range(0, count, 100):
        await asyncio.gather(*(prepare(client, number) for number in range(start, start + 100)))
    seconds, cpu = [], []
    for _ in range(2):
        before, started = served.cpu(), time.perf_counter()
        division = await client.divide()
        seconds.append(time.perf_counter() - started)
        cpu.append(served.cpu() - before)
        assert len(division.advice) == count
    started = time.perf_counter()
    for number in range(100):
        await client.plan(f"job-{number}", shape(4))
    return {
        "jobs": count,
        "first_s": seconds[0],
        "first_cpu_s": cpu[0],
        "again_s": seconds[1],
        "again_cpu_s": cpu[1],
        "plan_from_division_ms": 10 * (time.perf_counter() - started),
    }


async def prepare(client: BrainClient, number: int) -> None:
    """A job that has run in three sizes."""
    job = f"job-{number}"
    await client.report(register(job, "cluster", "all-reduce"))
    measured = [(shape(n), throughput(n, number)) for n in (1, 2, 4)]
    await client.report(report(job, *measured))


async def records(address: str, seconds: float, clients: int) -> float:
    """Reports acknowledged in a second, by so many clients that each wait for the answer."""
    until, done = time.perf_counter() + seconds, 0

    async def write(client: BrainClient) -> None:
        nonlocal done
        while time.perf_counter() < until:
            await client.report(report("load", (shape(1), 640.0)))
            done += 1

    async with contextlib.AsyncExitStack() as stack:
        made = [await stack.enter_async_context(BrainClient(address, TOKEN)) for _ in range(8)]
        await made[0].report(register("load", "manual", "all-reduce"))
        started = time.perf_counter()
        await asyncio.gather(*(write(made[n % len(made)]) for n in range(clients)))
        return done / (time.perf_counter() - started)


def commits(url: str, seconds: float) -> float:
    """Commits of one row in a second, by one connection that does nothing else."""
    engine = sa.create_engine(url)
    table = sa.Table(
        "bare", sa.MetaData(), sa.Column("id", sa.Integer), sa.Column("text", sa.String(200))
    )
    table.create(engine)
    text = "x" * 200
    with engine.connect() as connection:
        if url.startswith("sqlite"):
            for pragma in ("journal_mode=WAL", "synchronous=FULL"):
                connection.exec_driver_sql(f"PRAGMA {pragma}")
            connection.commit()
        started, done = time.perf_counter(), 0
        while time.perf_counter() < started + seconds:
            connection.execute(table.insert().values(id=done, text=text))
            connection.commit()
            done += 1
        rate = done / (time.perf_counter() - started)
    table.drop(engine)
    engine.dispose()
    return rate


@contextlib.contextmanager
def databases(folder: Path) -> Iterator[dict[str, str]]:
    """URLs of new databases by kind, on the same disk; those whose servers are installed."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests import databases as servers  # noqa: PLC0415

    servers.FAST = folder
    found = {"SQLite": f"sqlite:///{folder}/brain.db"}
    with contextlib.ExitStack() as stack:
        for name, start in (("MariaDB", servers.mariadb), ("PostgreSQL", servers.postgresql)):
            found[name] = stack.enter_context(start()).create("brain")
        yield found


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--times", type=int, default=200, help="plans for one job")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--folder", help="on the disk that is measured")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    found: dict[str, Any] = {"load_average": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        folder.chmod(0o755)
        with serving(f"sqlite:///{folder}/plans.db", 0) as served:
            asyncio.run(_plans(served, args, found))
        print(f"plan for one job: {found['plan']}\ncluster: {found['cluster']}")
        with databases(folder) as urls:
            for kind, url in urls.items():
                bare = commits(url.replace("brain.db", "bare.db"), args.seconds)
                row: dict[str, Any] = {"bare_commits": bare}
                with serving(url, None) as served:
                    for clients in args.clients:
                        rate = asyncio.run(records(served.address, args.seconds, clients))
                        row[f"{clients}_clients"] = rate
                found.setdefault("records", {})[kind] = row
                print(f"{kind}: {row}")
    args.output.write_text(json.dumps(found, indent=1) + "\n")


async def _plans(served: Served, args: argparse.Namespace, found: dict[str, Any]) -> None:
    async with BrainClient(served.address, TOKEN, timeout=60.0) as client:
        found["plan"] = await plans(client, served, args.times)
        found["cluster"] = await divide(client, served, args.jobs)


if __name__ == "__main__":
    main()
