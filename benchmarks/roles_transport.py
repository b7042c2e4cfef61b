"""What calls and weights between processes of roles cost, beside one copy of as much memory in the same run.

A coordinator's service, a process that keeps weights and a member of a role run on this machine; the driver is this process.
If Ray is installed, a plain Ray actor and its object store do the same. ``benchmarks/README.md`` explains every figure.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dlrover.roles import RoleGroup, current_worker, rpc, weights
from dlrover.roles.messages import HOLDER
from dlrover.roles.runtime import environment, holder, worker
from dlrover.roles.serving import RolesService
from dlrover.rpc.server import Server

MIB = 1 << 20
TOKEN = "a-token-of-a-benchmark"


class Member:
    """The other role."""

    def __init__(self) -> None:
        self.target: dict[str, Any] = {}

    @rpc
    def echo(self, value: int) -> int:
        """Return the value."""
        return value

    @rpc
    def size(self, array: Any) -> int:
        """Return the bytes of an array."""
        return int(array.nbytes)

    @rpc
    def load(self, tensors: int, nbytes: int) -> list[float]:
        """Take the latest weights; return the seconds to map them, and to check and copy them."""
        if not self.target:
            self.target = {f"w{i}": np.ones(nbytes, np.uint8) for i in range(tensors)}
        began = time.perf_counter()
        found = weights.latest()
        assert found is not None
        mapped = time.perf_counter()
        found.load_into(self.target)
        return [mapped - began, time.perf_counter() - mapped]

    def take(self, state: dict[str, Any]) -> float:
        """Copy what Ray's object store holds; return the seconds of the copy."""
        if not self.target:
            self.target = {key: np.ones_like(value) for key, value in state.items()}
        return seconds(lambda: [np.copyto(self.target[key], state[key]) for key in state])


class NoJournal:
    """Keeps nothing: this is about transport."""

    def append(self, entry: bytes, now: float) -> None:
        """Take an entry."""

    replace = append


def serve(token_file: Path, started: Callable[[str], None], lifeline: int) -> None:
    """Run the service of a coordinator, and keep a process for weights."""

    async def run() -> None:
        service = RolesService(NoJournal())
        server = Server(TOKEN, program="coordinator")
        service.register(server)
        address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
        service.begin()
        started(address)
        await holder.keep(service, environment.variables(address, token_file, HOLDER, 0), lifeline)

    asyncio.run(run())


def median(rounds: int, measured: Callable[[], float]) -> float:
    """Median of several measurements, after one that does not count."""
    measured()
    return statistics.median(measured() for _ in range(rounds))


def seconds(what: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def calls(group: RoleGroup, count: int, array: Any, rounds: int) -> dict[str, float]:
    """Calls, and an array as an argument."""

    def many() -> None:
        for number in range(count):
            group.call_rank0("echo", number).result()

    def at_once() -> None:
        for future in [group.call_rank0("echo", number) for number in range(count)]:
            future.result()

    large = median(rounds, lambda: seconds(lambda: group.call_rank0("size", array).result()))
    return {
        "calls_per_second": count / median(rounds, lambda: seconds(many)),
        "calls_per_second_at_once": count / median(rounds, lambda: seconds(at_once)),
        "bytes_per_second": array.nbytes / large,
    }


def weighed(group: RoleGroup, tensors: int, nbytes: int, rounds: int) -> dict[str, float]:
    """Publish here, load there, and copy the same memory in turn."""
    state = {f"w{i}": np.full(nbytes, i, np.uint8) for i in range(tensors)}
    other = {key: np.ones(nbytes, np.uint8) for key in state}
    copied, published, mapped, loaded = [], [], [], []
    for step in range(1, rounds + 5):
        one = seconds(lambda: [np.copyto(other[key], state[key]) for key in state])
        two = seconds(lambda step=step: weights.publish(state, step))
        three, four = group.call_rank0("load", tensors, nbytes).result()
        if step > 4:  # all memory has been used once, as later in a job
            for figures, figure in zip(
                (copied, published, mapped, loaded), (one, two, three, four), strict=True
            ):
                figures.append(figure)
    copy, publish, latest, load = map(statistics.median, (copied, published, mapped, loaded))
    return {
        "bytes": tensors * nbytes,
        "copy_seconds": copy,
        "publish_seconds": publish,
        "latest_seconds": latest,
        "load_into_seconds": load,
        "publish_of_a_copy": copy / publish,
        "load_of_a_copy": copy / (latest + load),
        "both_of_two_copies": 2 * copy / (publish + latest + load),
        "both_of_a_copy": copy / (publish + latest + load),
    }


def with_ray(
    count: int, array: Any, tensors: int, nbytes: int, rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """The same calls, and weights, with a plain Ray actor and the object store."""
    import ray  # noqa: PLC0415 - not installed everywhere

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    actor = ray.remote(Member).remote()

    def many() -> None:
        for number in range(count):
            ray.get(actor.echo.remote(number))

    def at_once() -> None:
        ray.get([actor.echo.remote(number) for number in range(count)])

    large = median(rounds, lambda: seconds(lambda: ray.get(actor.size.remote(ray.put(array)))))
    found = {
        "calls_per_second": count / median(rounds, lambda: seconds(many)),
        "calls_per_second_at_once": count / median(rounds, lambda: seconds(at_once)),
        "bytes_per_second": array.nbytes / large,
    }
    stored = weighed_by_ray(ray, actor, tensors, nbytes, rounds)
    ray.shutdown()
    return found, stored


def weighed_by_ray(
    ray: Any, actor: Any, tensors: int, nbytes: int, rounds: int
) -> dict[str, float]:
    """Put weights into the object store here, take and copy them there, and copy the same memory in turn."""
    state = {f"w{i}": np.full(nbytes, i, np.uint8) for i in range(tensors)}
    other = {key: np.ones(nbytes, np.uint8) for key in state}
    copied, put, taken, loaded = [], [], [], []
    for step in range(1, rounds + 5):
        copied.append(seconds(lambda: [np.copyto(other[key], state[key]) for key in state]))
        began = time.perf_counter()
        reference = ray.put(state)
        put.append(time.perf_counter() - began)
        loaded.append(ray.get(actor.take.remote(reference)))
        taken.append(time.perf_counter() - began)
        del reference
        if step == 4:  # all memory has been used once, as later in a job
            for figures in (copied, put, taken, loaded):
                figures.clear()
    copy, whole = statistics.median(copied), statistics.median(taken)
    return {
        "copy_seconds": copy,
        "put_seconds": statistics.median(put),
        "copy_of_what_was_taken_seconds": statistics.median(loaded),
        "put_take_and_copy_seconds": whole,
        "both_of_two_copies": 2 * copy / whole,
        "both_of_a_copy": copy / whole,
    }


def main() -> None:  # noqa: PLR0915 - a script
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the weights")
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    read_fd, write_fd = os.pipe()
    with tempfile.TemporaryDirectory() as directory:
        token = Path(directory) / "token"
        token.write_text(TOKEN)
        ready, addresses = threading.Event(), []

        def started(address: str) -> None:
            addresses.append(address)
            ready.set()

        threading.Thread(target=serve, args=(token, started, read_fd), daemon=True).start()
        ready.wait()

        def variables(role: str) -> dict[str, str]:
            return environment.variables(addresses[0], token, role, 1)

        path = str(Path(__file__).parent)
        member = subprocess.Popen(
            [sys.executable, "-m", "dlrover.roles.runtime.serve", "roles_transport:Member"],
            env={
                **os.environ,
                **variables("member"),
                "PYTHONPATH": os.pathsep.join([path, *sys.path]),
            },
        )
        os.environ.update(variables("driver"))
        try:
            group = RoleGroup("member")
            group.wait(1)
            RoleGroup(HOLDER).wait(1)
            array = np.ones(64 * MIB, np.uint8)
            figures: dict[str, Any] = {
                "calls, Unix socket": calls(group, args.calls, array, args.rounds)
            }
            figures["weights"] = weighed(
                group, args.tensors, args.mib * MIB // args.tensors, args.rounds
            )
            worker.leave()
            worker.machine.cache_clear()
            worker.machine = lambda: "another machine"
            figures["calls, TCP"] = calls(RoleGroup("member"), args.calls, array, args.rounds)
            current_worker().close()
            if importlib.util.find_spec("ray"):
                size = args.mib * MIB // args.tensors
                called, stored = with_ray(args.calls, array, args.tensors, size, args.rounds)
                figures |= {"calls, Ray actor": called, "weights, Ray's object store": stored}
        finally:
            member.kill()
            member.wait()
            os.close(write_fd)
    for name, found in figures.items():
        print(name)
        for key, value in found.items():
            print(f"  {key:40} {value:,.3f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
