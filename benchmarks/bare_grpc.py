"""What gRPC alone costs: bare grpc.aio servers, floods of messages, and the CPU time that they take."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import grpc.aio
import psutil

from dlrover.rpc import wire

Row = dict[str, Any]

SERVICE = "bare.Echo"
STREAMS = 16
"""Closed loops that a flood runs at a time."""
_usable = sorted(os.sched_getaffinity(0))
SERVER_CORE, GENERATOR_CORE = _usable[0], _usable[-1]
"""The same one on a machine with a single core."""


def pin(pid: int, core: int) -> None:
    """Run every thread of a process on one core; threads to come inherit it."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


@final
class Meter:
    """CPU time that a process uses in a ``with`` block."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.cpu = self.wall = 0.0

    def __enter__(self) -> Meter:
        self._began, self._used = time.perf_counter(), self._total()
        return self

    def __exit__(self, *exc: object) -> None:
        self.wall = time.perf_counter() - self._began
        self.cpu = self._total() - self._used

    def _total(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def rss_mib(self) -> float:
        """Resident memory now."""
        return round(self._process.memory_info().rss / 2**20, 1)


async def serve_bare() -> None:
    """Serve echo and sink methods by grpc.aio alone; print the port."""

    async def unary(data: bytes, _context: object) -> bytes:
        return data

    async def echo(frames: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for data in frames:
            yield data

    async def sink(frames: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for data in frames:
            last = data
        yield last

    methods = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
        "Sink": grpc.stream_stream_rpc_method_handler(sink),
    }
    server = grpc.aio.server(options=list(wire.SERVER_OPTIONS))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


@contextlib.contextmanager
def bare_server() -> Iterator[tuple[int, str]]:
    """The process of `serve_bare`, and its address."""
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = f"127.0.0.1:{process.stdout.readline().strip()}"
            pin(process.pid, SERVER_CORE)
            yield process.pid, address
        finally:
            process.kill()


# ---- floods


async def flood_unary(channel: grpc.aio.Channel, method: str, frame: bytes, seconds: float) -> int:
    """Send requests in closed loops for so long; how many were answered."""
    call = channel.unary_unary(method)
    until = time.perf_counter() + seconds
    metadata_ = ((wire.TOKEN_KEY, "simulated"),)

    async def loop() -> int:
        count = 0
        while time.perf_counter() < until:
            await call(frame, metadata=metadata_)
            count += 1
        return count

    return sum(await asyncio.gather(*(loop() for _ in range(STREAMS))))


async def flood_echo(channel: grpc.aio.Channel, method: str, frame: bytes, seconds: float) -> int:
    """Ping-pong on streams for so long; how many messages came back."""
    until = time.perf_counter() + seconds

    async def loop() -> int:
        stream = channel.stream_stream(method)()
        count = 0
        while time.perf_counter() < until:
            await stream.write(frame)
            await stream.read()
            count += 1
        stream.cancel()
        return count

    return sum(await asyncio.gather(*(loop() for _ in range(STREAMS))))


async def flood_sink(streams: Sequence[Any], frame: bytes, seconds: float) -> int:
    """Write to open streams for so long, close them, and wait until the server has read it all."""
    until = time.perf_counter() + seconds

    async def loop(stream: Any) -> int:
        count = 0
        while time.perf_counter() < until:
            await stream.write(frame)
            count += 1
        await stream.done_writing()
        # The server ends its side after the last message: only then have all been handled.
        while await stream.read() is not grpc.aio.EOF:
            pass
        return count

    return sum(await asyncio.gather(*(loop(stream) for stream in streams)))


async def measured(pid: int, flood: Awaitable[int]) -> Row:
    """Rate of a flood, and what a message costs the server."""
    with Meter(pid) as meter:
        count = await flood
    return {
        "messages_per_s": round(count / meter.wall),
        "server_cpu_percent": round(100 * meter.cpu / meter.wall),
        "server_us_per_message": round(1e6 * meter.cpu / count, 1),
        "messages_per_core_s": round(count / meter.cpu),
    }


if __name__ == "__main__":
    asyncio.run(serve_bare())
