"""What a pull of embedding rows costs: our servers beside bare gRPC and torch's RPC, with the same table behind each.

One client and one server, two processes on one machine; the client asks for the rows of random keys of the table,
again and again. Each server looks the keys up in a `HashTable` and returns the rows: ours by its own protocol, gRPC
with bytes in and out and no serialization, torch's RPC with tensors. The systems take turns.
``benchmarks/README.md`` explains every figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import psutil
import torch
from torch.distributed import rpc

from dlrover.embedding import HashTable
from dlrover.embedding.machine.placement import Placement
from dlrover.embedding.remote.client import ServerGroup
from dlrover.embedding.remote.holding import HeldSlots
from dlrover.embedding.remote.server import EmbeddingServer
from dlrover.spec.requests.placement import Announce, LookPlacement, OpenTable, PlacementReply

DIM, ROWS, SIZES = 64, 200_000, (64, 1024, 8192, 32_768)
METHOD, HOST = "/bare.Rows/Pull", "127.0.0.1"
UNBOUNDED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
TCP = {"_transports": ["uv"], "_channels": ["basic"]}
"""Options with which torch's RPC uses TCP, as between machines; by default it uses shared memory on one."""
SYSTEMS = ("dlrover", "grpc", "torch", "torch-tcp")
Pull = Callable[[np.ndarray], np.ndarray]

_table = HashTable(DIM, optimizer="sgd")


class Directory:
    """Placement on a single server, as this process knows it."""

    def __init__(self) -> None:
        self.placement = Placement()

    def ask(self, request: Any) -> PlacementReply:
        """Return the reply to a request."""
        return msgspec.structs.replace(self.placement.handle(request), secret=b"benchmark")

    def look(self, known: int) -> PlacementReply:
        """Return the placement."""
        return self.ask(LookPlacement(known))


def filled(lookup: Pull) -> None:
    """Make all rows."""
    for first in range(0, ROWS, 8192):
        lookup(np.arange(first, min(first + 8192, ROWS)))


# ---- servers


def serve(system: str, port: int) -> None:
    """Serve until the client ends; say the port once ready."""
    if system == "dlrover":
        directory = Directory()
        rows = EmbeddingServer(0, 1, 1, directory, HeldSlots(), lambda *_: None)
        directory.ask(OpenTable("rows", _table.options.json()))
        threading.Thread(target=rows.run, daemon=True).start()
        say(rows.port)
        signal.pause()
        return
    filled(_table.lookup)
    if system == "grpc":
        server = grpc_server()
        say(server.add_insecure_port(f"{HOST}:0"))
        server.start()
        server.wait_for_termination()
    else:
        join(system, 1, port)
        rpc.shutdown()


def grpc_server() -> grpc.Server:
    """Return a server with bytes in and out."""

    def pull(keys: bytes, _context: object) -> bytes:
        return memoryview(_table.lookup(np.frombuffer(keys, np.int64))).tobytes()

    methods = {"Pull": grpc.unary_unary_rpc_method_handler(pull)}
    server = grpc.server(ThreadPoolExecutor(4), options=UNBOUNDED)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Rows", methods),))
    return server


def torch_pull(keys: Any) -> Any:
    """Return rows as a tensor, in the server of torch's RPC."""
    return _table.lookup(keys)


def join(system: str, rank: int, port: int) -> None:
    """Join the group of torch's RPC."""
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{HOST}:{port}", **(TCP if system == "torch-tcp" else {})
    )
    rpc.init_rpc(f"node{rank}", rank=rank, world_size=2, rpc_backend_options=options)


def say(port: int) -> None:
    """Tell the client the port."""
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()


# ---- clients


def client(system: str, port: int) -> tuple[Pull, Callable[[], None]]:
    """Return what pulls rows as an array, and what ends it."""
    if system == "dlrover":
        directory = Directory()
        directory.ask(Announce(0, 1, HOST, port, 1))
        group = ServerGroup(directory)
        number = group.open("rows", _table.options.json())
        pull: Pull = lambda keys: group.rows(number, DIM, keys, insert=True)  # noqa: E731
        filled(pull)
        return pull, group.close
    if system == "grpc":
        channel = grpc.insecure_channel(f"{HOST}:{port}", options=UNBOUNDED)
        call = channel.unary_unary(METHOD)
        return lambda keys: np.frombuffer(
            call(memoryview(keys).tobytes()), np.float32
        ), channel.close
    join(system, 0, port)
    return lambda keys: rpc.rpc_sync(
        "node1", torch_pull, (torch.from_numpy(keys),)
    ).numpy(), rpc.shutdown


def measure(system: str, seconds: float) -> list[dict[str, float]]:
    """Start a server, pull from it with each size, and return what that took."""
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--serve", system, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        if system in ("dlrover", "grpc"):
            assert server.stdout is not None
            port = int(server.stdout.readline())
        pull, close = client(system, port)
        both = psutil.Process(), psutil.Process(server.pid)
        found = [one(pull, size, seconds, *both) for size in SIZES]
        close()
    finally:
        server.kill()
        server.wait()
    return found


def one(pull: Pull, size: int, seconds: float, *processes: psutil.Process) -> dict[str, float]:
    """Pull rows of one size for some time, in which the rows of the first pull are checked."""
    random = np.random.default_rng(size)
    batches = [random.integers(0, ROWS, size) for _ in range(16)]
    expected = HashTable(DIM, optimizer="sgd").lookup(batches[0])
    assert (pull(batches[0]).reshape(size, DIM) == expected).all()
    for batch in batches:
        pull(batch)
    before, began, count = [used(each) for each in processes], time.perf_counter(), 0
    while (wall := time.perf_counter() - began) < seconds:
        pull(batches[count % 16])
        count += 1
    client_cpu, server_cpu = (used(p) - b for p, b in zip(processes, before, strict=True))
    nbytes = count * size * 4 * DIM
    return {
        "rows": size,
        "pulls/s": count / wall,
        "MB/s per core of the server": nbytes / 1e6 / server_cpu,
        "MB/s per core of both": nbytes / 1e6 / (client_cpu + server_cpu),
        "CPU us per pull": (client_cpu + server_cpu) / count * 1e6,
    }


def used(process: psutil.Process) -> float:
    """CPU time of a process and its threads."""
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--pull", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.port)
        return
    if given.pull:
        sys.stdout.write(json.dumps(measure(given.pull, given.seconds)))
        return
    loads, runs = [os.getloadavg()[0]], []
    for _ in range(given.rounds):
        for system in SYSTEMS:
            command = [sys.executable, __file__, "--pull", system, "--seconds", str(given.seconds)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
            runs += [{"system": system} | row for row in json.loads(done.stdout)]
        loads.append(os.getloadavg()[0])
    found = {
        "machine": platform.platform(),
        "versions": {name: metadata.version(name) for name in ("numpy", "grpcio", "torch")},
        "load": loads,
        "median": [summary(runs, system, size) for size in SIZES for system in SYSTEMS],
        "runs": runs,
    }
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(json.dumps(found | {"runs": len(runs)}, indent=1) + "\n")


def summary(runs: list[dict[str, Any]], system: str, size: int) -> dict[str, Any]:
    """Return the medians of one system's runs with one size."""
    rows = [run for run in runs if (run["system"], run["rows"]) == (system, size)]
    names = [name for name in rows[0] if name not in ("system", "rows")]
    medians = {name: round(statistics.median(row[name] for row in rows), 1) for name in names}
    return {"system": system, "rows": size} | medians


if __name__ == "__main__":
    main()
