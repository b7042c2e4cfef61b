"""One operator and many jobs on a real API server: how soon it reacts, its memory, and the calls of a job.

There are no machines: a stand-in for kubelet and masters marks each master as running, and makes the job's
worker pods, which run at once. The API server's own speed, measured in the same run without the operator, shows
what is the operator's. ``benchmarks/README.md`` explains every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlrover.kubernetes.api.client import ELASTIC_JOBS, PODS, Client
from dlrover.kubernetes.api.informer import Informer
from dlrover.kubernetes.resources import names
from tests.kubernetes import assets
from tests.kubernetes.controlplane import ControlPlane, free_ports
from tests.kubernetes.installed import define

NAMESPACES = 10
PARALLEL = 16
"""Calls at once, as many as the operator works on jobs."""
IMAGE = "train:1"
READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
Row = dict[str, Any]


# ---- the cluster


@contextlib.asynccontextmanager
async def a_cluster(folder: Path) -> AsyncIterator[tuple[ControlPlane, Client]]:
    """A control plane that knows ElasticJobs, without a scheduler, and its namespaces."""
    plane = ControlPlane(assets.find(), folder)
    client: Client | None = None
    try:
        plane.start()
        plane.kill("kube-scheduler")  # there are no nodes: it would only say so
        define(plane)
        for number in range(NAMESPACES):
            plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": f"scale-{number}"}})
            plane.wait_for_account(f"scale-{number}")
        client = Client.from_config(str(plane.kubeconfig))
        yield plane, client
    finally:
        if client is not None:
            await client.close()
        plane.stop()


def namespace(number: int) -> str:
    """Where a job is."""
    return f"scale-{number % NAMESPACES}"


async def at_once(call: Callable[[int], Awaitable[Any]], count: int) -> None:
    """Make a call for each number below ``count``, `PARALLEL` at a time."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await call(number)

    await asyncio.gather(*(work() for _ in range(PARALLEL)))


def pod(name: str, where: str, labels: dict[str, str], owner: Row | None = None) -> Row:
    """A pod's manifest."""
    container = {"name": "main", "image": IMAGE, "command": ["dlrover-run", "train.py"]}
    metadata = {"name": name, "namespace": where, "labels": labels}
    return {
        "metadata": metadata | ({"ownerReferences": [owner]} if owner else {}),
        "spec": {"containers": [container], "restartPolicy": "Never"},
    }


def job(number: int, workers: int) -> Row:
    """A job's manifest."""
    container = {"name": "main", "image": IMAGE, "command": ["dlrover-run", "train.py"]}
    worker = {"replicas": workers, "template": {"spec": {"containers": [container]}}}
    return {
        "metadata": {"name": f"job-{number}", "namespace": namespace(number)},
        "spec": {"replicaSpecs": {"worker": worker}},
    }


async def bare(client: Client, count: int) -> Row:
    """Pods that are created and marked as running by nobody but this process."""
    made = [pod(f"bare-{n}", namespace(n), {"bare": "1"}) for n in range(count)]
    began = time.perf_counter()
    await at_once(lambda n: client.create(PODS, made[n]), count)
    created = time.perf_counter()
    await at_once(lambda n: run(client, namespace(n), f"bare-{n}"), count)
    patched = time.perf_counter()
    for number in range(NAMESPACES):
        path = f"/api/v1/namespaces/scale-{number}/pods?labelSelector=bare"
        await client._call("DELETE", path, body={"gracePeriodSeconds": 0})  # noqa: SLF001
    return {
        "creates_per_second": count / (created - began),
        "patches_per_second": count / (patched - created),
    }


async def run(client: Client, where: str, name: str) -> None:
    """Mark a pod as running and ready."""
    await client.patch(PODS, where, name, {"status": READY}, "status")


# ---- who runs the pods


class Nodes:
    """Runs each master as soon as it is there, and makes its workers once."""

    def __init__(self, client: Client, workers: int) -> None:
        self._client, self._workers = client, workers
        self._informer = Informer(client, PODS, None, names.JOB_LABEL, self._changed)
        self._masters: asyncio.Queue[str] = asyncio.Queue()
        self._begun: set[str] = set()
        self.created: dict[str, float] = {}
        """When the newest master of each job was first seen."""
        self._uids: dict[str, str] = {}
        self.running = 0
        """Pods that run."""
        self.calls = 0
        client.on_call = self._called

    @contextlib.asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """Run pods while the block lasts."""
        tasks = [asyncio.create_task(self._informer.run())]
        tasks += [asyncio.create_task(self._serve()) for _ in range(PARALLEL)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result

    def _called(self, _method: str, _code: str) -> None:
        self.calls += 1

    async def another(self, key: str, last: float) -> None:
        """Wait for the next master of a job."""
        late = time.perf_counter() + 120.0
        while self.created[key] == last:
            if time.perf_counter() > late:
                raise TimeoutError(key)
            await asyncio.sleep(0.001)

    def _changed(self, key: str) -> None:
        seen = self._informer.cache.get(key)
        if seen is None or not key.endswith("-dlrover-master"):
            return
        uid = seen["metadata"]["uid"]
        if self._uids.get(key) != uid:
            self._uids[key] = uid
            self.created[key] = time.perf_counter()
            self._masters.put_nowait(key)

    async def _serve(self) -> None:
        while True:
            key = await self._masters.get()
            where, _, name = key.partition("/")
            await run(self._client, where, name)
            if key in self._begun:
                continue
            self._begun.add(key)
            self.running += 1
            master = self._informer.cache[key]["metadata"]
            labels = names.labels(master["labels"][names.JOB_LABEL], "worker")
            owner = master["ownerReferences"][0]
            for number in range(self._workers):
                worker = f"{owner['name']}-edljob-worker-{number}"
                await self._client.create(PODS, pod(worker, where, labels, owner))
                await run(self._client, where, worker)
                self.running += 1


# ---- the operator


class Operator:
    """``dlrover operator`` as a process, and what its port says."""

    def __init__(self, kubeconfig: Path, log: Path) -> None:
        (self._port,) = free_ports(1)
        command = ["dlrover", "operator", "--no-leader-election"]
        command += ["--kubeconfig", str(kubeconfig), "--http-port", str(self._port)]
        with log.open("wb") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file)
        self._ps = psutil.Process(self._process.pid)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()

    def ready(self) -> bool:
        """Whether it works."""
        with contextlib.suppress(OSError):
            return bool(self._get("/readyz"))
        return False

    def counts(self) -> Row:
        """Its CPU seconds, memory and metrics."""
        counts: Row = {"cpu": sum(self._ps.cpu_times()[:2]), "rss": self._ps.memory_info().rss}
        calls: Counter[str] = Counter()
        for family in text_string_to_metric_families(self._get("/metrics")):
            for sample in family.samples:
                short = sample.name.removeprefix("dlrover_operator_")
                if short == "api_requests_total":
                    calls[f"{sample.labels['method']} {sample.labels['code']}"] += int(sample.value)
                elif "le" in sample.labels:
                    counts.setdefault(short, {})[float(sample.labels["le"])] = sample.value
                elif "phase" in sample.labels:
                    counts.setdefault(short, {})[sample.labels["phase"]] = sample.value
                else:
                    counts[short] = sample.value
        return counts | {"calls": calls}

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=30) as answer:
            return str(answer.read().decode())


def share_within(before: Row, after: Row, name: str, share: float) -> float:
    """The upper bound of the bucket in which so large a share of what was counted meanwhile lies."""
    old: dict[float, float] = before[f"{name}_bucket"]
    new: dict[float, float] = after[f"{name}_bucket"]
    total = new[float("inf")] - old[float("inf")]
    return min(bound for bound in new if new[bound] - old[bound] >= share * total)


async def until(condition: Callable[[], Any], what: str, timeout: float = 1800.0) -> None:
    """Wait for something."""
    late = time.perf_counter() + timeout
    while not condition():
        if time.perf_counter() > late:
            raise TimeoutError(what)
        await asyncio.sleep(0.2)


# ---- the phases


async def submitted(client: Client, operator: Operator, nodes: Nodes, args: Any) -> Row:
    """Create all jobs, as fast as the API server takes them, until all pods run."""
    before = operator.counts()
    sent: dict[str, float] = {}

    async def create(number: int) -> None:
        sent[f"{namespace(number)}/{names.master_name(f'job-{number}')}"] = time.perf_counter()
        await client.create(ELASTIC_JOBS, job(number, args.workers))

    others = nodes.calls
    began = time.perf_counter()
    await at_once(create, args.jobs)
    took = time.perf_counter() - began
    pods = args.jobs * (args.workers + 1)
    await until(lambda: nodes.running == pods, f"{pods} pods running")
    seconds = time.perf_counter() - began

    def settled() -> bool:
        counts = operator.counts()
        return counts["jobs"]["Running"] == args.jobs and not counts["queue_depth"]

    await until(settled, "all jobs Running")
    after = operator.counts()
    latency = [nodes.created[key] - sent[key] for key in sent]
    told = time.perf_counter() - began
    ours = (after["calls"] - before["calls"]).total()
    return spent(before, after, args.jobs) | {
        "calls_per_second": ours / told,
        "calls_per_second_with_the_stand_in": (ours + nodes.calls - others) / told,
        "jobs_per_second_submitted": args.jobs / took,
        "seconds_until_all_pods_ran": seconds,
        "seconds_until_all_told": told,
        "master_after_submission": quantiles(latency),
        "reconcile_within": {
            str(share): share_within(before, after, "reconcile_duration_seconds", share)
            for share in (0.5, 0.99)
        },
    }


async def replaced(client: Client, operator: Operator, nodes: Nodes, args: Any) -> Row:
    """One master after the other is deleted; the time until the next one is there."""
    before = operator.counts()
    latency, bare_latency = [], []
    for number in range(args.losses):
        where, name = namespace(number), names.master_name(f"job-{number}")
        key = f"{where}/{name}"
        last = nodes.created[key]
        began = time.perf_counter()
        await client.delete(PODS, where, name, grace=0)
        bare_latency.append(time.perf_counter() - began)
        await nodes.another(key, last)
        latency.append(nodes.created[key] - began)
    after = operator.counts()
    return spent(before, after, args.losses) | {
        "master_after_loss": quantiles(latency),
        "the_deletion_alone": quantiles(bare_latency),
    }


async def idle(operator: Operator, seconds: float) -> Row:
    """Nothing happens."""
    before = operator.counts()
    await asyncio.sleep(seconds)
    after = operator.counts()
    return {
        "cpu_share": (after["cpu"] - before["cpu"]) / seconds,
        "calls": (after["calls"] - before["calls"]).total(),
        "seconds": seconds,
    }


async def restarted(plane: ControlPlane, args: Any, log: Path) -> Row:
    """Another operator finds everything as it should be."""
    began = time.perf_counter()
    operator = Operator(plane.kubeconfig, log)
    try:
        await until(operator.ready, "a new operator")
        ready = time.perf_counter() - began

        def looked() -> bool:
            counts = operator.counts()
            seen = counts["reconcile_duration_seconds_count"] >= args.jobs
            return seen and not counts["queue_depth"]

        await until(looked, "a look at all jobs")
        counts = operator.counts()
        return {
            "seconds_until_ready": ready,
            "seconds_until_all_looked_at": time.perf_counter() - began,
            "cpu_seconds": counts["cpu"],
            "rss_mib": counts["rss"] / 2**20,
            "calls": counts["calls"].total(),
        }
    finally:
        operator.close()


def spent(before: Row, after: Row, jobs: int) -> Row:
    """What the operator did between two looks."""
    calls = after["calls"] - before["calls"]
    calls = Counter({kind: n for kind, n in calls.items() if not kind.startswith("WATCH")})
    reconciles = (
        after["reconcile_duration_seconds_count"] - before["reconcile_duration_seconds_count"]
    )
    return {
        "api_requests_per_job": calls.total() / jobs,
        "api_requests": dict(calls.most_common()),
        "reconciles_per_job": reconciles / jobs,
        "cpu_seconds": after["cpu"] - before["cpu"],
        "cpu_ms_per_reconcile": 1e3 * (after["cpu"] - before["cpu"]) / reconciles,
        "rss_mib": after["rss"] / 2**20,
        "errors": after["reconcile_errors_total"] - before["reconcile_errors_total"],
    }


def quantiles(seconds: Sequence[float]) -> Row:
    """Median, 99th percentile and longest."""
    p99 = statistics.quantiles(seconds, n=100, method="inclusive")[98]
    return {"p50": statistics.median(seconds), "p99": p99, "max": max(seconds)}


# ---- all of it


async def measure(args: argparse.Namespace) -> Row:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with a_cluster(folder / "plane") as (plane, client):
            base = await bare(client, args.bare)
            print(f"bare: {base['creates_per_second']:.0f} creates/s", flush=True)
            load = os.getloadavg()[0]
            operator = Operator(plane.kubeconfig, folder / "operator.log")
            try:
                await until(operator.ready, "the operator")
                empty = operator.counts()["rss"] / 2**20
                nodes = Nodes(client, args.workers)
                async with nodes.work():
                    first = await submitted(client, operator, nodes, args)
                    tell(args, base, first, empty)
                    quiet = await idle(operator, args.idle)
                    losses = await replaced(client, operator, nodes, args)
            finally:
                operator.close()
            again = await restarted(plane, args, folder / "again.log")
    results = {
        "jobs": args.jobs,
        "pods": args.jobs * (args.workers + 1),
        "load_at_start": load,
        "bare": base,
        "rss_mib_of_no_job": empty,
        "submission": first,
        "idle": quiet,
        "loss": losses,
        "restart": again,
    }
    tell_rest(results)
    return results


def tell(args: Any, base: Row, first: Row, empty: float) -> None:
    """Print the figures of the submission."""
    busy = first["calls_per_second_with_the_stand_in"] / base["creates_per_second"]
    print(
        f"{args.jobs} jobs: master after p50 {first['master_after_submission']['p50']:.1f} s, p99 "
        f"{first['master_after_submission']['p99']:.1f} s; {first['api_requests_per_job']:.1f} calls a job, "
        f"{first['reconciles_per_job']:.1f} reconciles, {first['cpu_ms_per_reconcile']:.1f} ms CPU each; "
        f"the server answered {busy:.2f} times its bare creates a second; "
        f"{first['rss_mib']:.0f} MiB ({empty:.0f} without jobs)",
        flush=True,
    )


def tell_rest(results: Row) -> None:
    """Print the figures of what follows."""
    lost, alone = results["loss"]["master_after_loss"], results["loss"]["the_deletion_alone"]
    print(
        f"a lost master: next after p50 {1e3 * lost['p50']:.0f} ms, p99 {1e3 * lost['p99']:.0f} ms "
        f"({lost['p50'] / alone['p50']:.1f} times the deletion alone); idle: "
        f"{100 * results['idle']['cpu_share']:.1f} % of a core, {results['idle']['calls']} calls in "
        f"{results['idle']['seconds']:g} s; another operator had looked at all after "
        f"{results['restart']['seconds_until_all_looked_at']:.1f} s, {results['restart']['calls']} calls"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument(
        "--workers", type=int, default=9, help="Pods of each job beside its master."
    )
    parser.add_argument("--losses", type=int, default=100, help="Masters that are deleted.")
    parser.add_argument("--bare", type=int, default=1000, help="Pods without the operator.")
    parser.add_argument("--idle", type=float, default=30.0, help="Seconds without a change.")
    parser.add_argument("--json", type=Path, help="Where to write the results.")
    args = parser.parse_args(argv)
    results = asyncio.run(measure(args))
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
