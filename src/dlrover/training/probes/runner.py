"""The work of the check process: reads requests from standard input, writes replies to standard output."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from dlrover import accelerators
from dlrover.accelerators import Vendor
from dlrover.spec.check import CheckOrder, Component, ProbeResult, ProbeState
from dlrover.training.probes.wire import (
    Began,
    Finished,
    Probe,
    ProbeReply,
    Reply,
    SharedValues,
    ShareValue,
)

NO_TORCH = "PyTorch is not installed"
HEALTH_SECONDS = 20.0
"""Time limit of a vendor's tool."""
NETWORK_SLACK = 10.0
"""Extra seconds for loading libraries: the network's own time limit, with its clearer error, comes first."""
SETTLE_SECONDS = 10.0
"""Time limit of a rank's wait for rank 0's combined values, and of rank 0's wait for their readers."""
FAULTS_VARIABLE = "DLROVER_PROBE_FAULTS"
"""Injected faults, for tests: ``NODE:COMPONENT:HOW,...`` with ``fail``, ``slow``, ``hang`` or ``die`` as ``HOW``."""
SLOWER = 5.0
"""Slow-down factor of a slow component."""


class Runner:
    """The executor of requests, one at a time."""

    def __init__(
        self,
        vendor: Vendor,
        directory: Path,
        environ: Mapping[str, str],
        say: Callable[[Reply], None],
        *,
        index: int = -1,
        meet: bool = False,
    ) -> None:
        """Set up without measuring.

        Args:
            vendor: Vendor of this machine's accelerators.
            directory: Directory whose disk is checked.
            environ: Environment variables, for injected faults and for ``meet``.
            say: Receives each reply.
            index: The only device to check; -1: all devices.
            meet: True for a rank of a launcher's job; `ShareValue` and the network probe use the job's store.
        """
        self._vendor = vendor
        self._directory = directory
        self._environ = environ
        self._say = say
        self._index = index
        self._meet = meet
        self._has_torch = importlib.util.find_spec("torch") is not None
        self._store: Any = None

    def share(self, request: ShareValue) -> None:
        """Share a value with the other ranks; rank 0 combines all values, so that all ranks get the same."""
        rank, size = int(self._environ["RANK"]), int(self._environ["WORLD_SIZE"])
        store = self._job_store(request.seconds)
        mine, everybody = f"{request.topic}/{rank}", f"{request.topic}/all"
        store.set(mine, request.value)
        values: list[str] = []
        if rank == 0:
            until = time.monotonic() + request.seconds
            values = [_get(store, f"{request.topic}/{i}", until) for i in range(size)]
            store.set(everybody, "\n".join(values))
        joined = _get(store, everybody, time.monotonic() + request.seconds + SETTLE_SECONDS)
        store.set(f"{mine}/seen", "1")
        until = time.monotonic() + SETTLE_SECONDS
        for other in [i for i, value in enumerate(values) if value]:
            # Rank 0's process may host the store, so it stays until the others have read.
            _get(store, f"{request.topic}/{other}/seen", until)
        self._say(SharedValues(tuple(joined.split("\n"))))

    def probe(self, request: Probe) -> None:
        """Carry out an order."""
        order, faults = request.order, InjectedFaults(self._environ, request.node)
        third = order.seconds / 3
        if order.local:
            self._check(faults, Component.DEVICE, third, self._devices)
            self._check(faults, Component.MEMORY, third / 4, lambda: [memory()])
            self._check(faults, Component.DISK, third / 4, lambda: [disk(self._directory)])
        if len(order.members) > 1:
            self._check(
                faults,
                Component.NETWORK,
                third + NETWORK_SLACK,
                lambda: [self._network(order, request.node, third)],
            )
        self._say(Finished())

    def _check(
        self,
        faults: InjectedFaults,
        component: Component,
        seconds: float,
        probes: Callable[[], Iterable[ProbeResult]],
    ) -> None:
        self._say(Began(component, seconds))
        try:
            faults.strike(component)
            for result in probes():
                self._say(ProbeReply(faults.slowed(result)))
        except (OSError, RuntimeError, ValueError) as error:
            self._say(ProbeReply(_failed(component, error)))

    def _devices(self) -> Iterator[ProbeResult]:
        vendor = self._vendor
        yield from self._health()
        if not self._has_torch:
            yield _skipped(Component.DEVICE, NO_TORCH)
            return
        from dlrover.training.probes import device  # noqa: PLC0415 - loads torch

        problem = device.usable(vendor)
        if problem:
            fault = device.built_for(vendor)
            state = ProbeState.FAILED if fault else ProbeState.SKIPPED
            yield ProbeResult(
                component=Component.DEVICE, name=vendor.name, state=state, message=problem
            )
            self._vendor = vendor = accelerators.CPU
        yield from device.probe(vendor, self._index)

    def _health(self) -> Iterator[ProbeResult]:
        """Yield a failure for each device that the vendor's tool reports as broken."""
        command = self._vendor.health_command
        if not command or shutil.which(command[0]) is None:
            return
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=HEALTH_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            raise OSError(110, f"{command[0]} does not answer") from None
        for found in self._vendor.parse_health(done.stdout + done.stderr):
            if found.problem and self._index in (-1, found.index):
                yield ProbeResult(
                    component=Component.DEVICE,
                    name=f"{self._vendor.torch_device}:{found.index}",
                    state=ProbeState.FAILED,
                    message=found.problem,
                )

    def _network(self, order: CheckOrder, node: int, seconds: float) -> ProbeResult:
        if not self._has_torch:
            return _skipped(Component.NETWORK, NO_TORCH)
        from dlrover.training.probes import device, network  # noqa: PLC0415 - loads torch

        vendor = accelerators.CPU if device.usable(self._vendor) else self._vendor
        store = self._job_store(seconds) if self._meet else None
        return network.probe(order, node, vendor, seconds, store, max(0, self._index))

    def _job_store(self, seconds: float) -> Any:
        """Return the store of the launcher's job; connect on the first call."""
        if self._store is None:
            import torch.distributed as dist  # noqa: PLC0415

            limit = timedelta(seconds=seconds)
            store, _, _ = next(dist.rendezvous("env://", timeout=limit))
            attempt = self._environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._store = dist.PrefixStore(f"dlrover check {attempt}", store)
        return self._store


def _get(store: Any, key: str, until: float) -> str:
    """Return a key's value; empty if it is not set before ``until`` (monotonic seconds)."""
    try:
        store.wait([key], timedelta(seconds=max(0.01, until - time.monotonic())))
        return str(store.get(key).decode())
    except RuntimeError:
        return ""


def _skipped(component: Component, why: str) -> ProbeResult:
    return ProbeResult(component=component, state=ProbeState.SKIPPED, message=why)


def _failed(component: Component, error: Exception) -> ProbeResult:
    lines = (error.strerror if isinstance(error, OSError) else None) or str(error)
    message = lines.strip().partition("\n")[0] or type(error).__name__
    return ProbeResult(component=component, state=ProbeState.FAILED, message=message)


class InjectedFaults:
    """The injected faults of one node; none outside tests."""

    def __init__(self, environ: Mapping[str, str], node: int) -> None:
        items = [item.split(":") for item in environ.get(FAULTS_VARIABLE, "").split(",") if item]
        self._how = {component: how for name, component, how in items if int(name) == node}

    def strike(self, component: Component) -> None:
        """Trigger the component's fault, if one is injected."""
        how = self._how.get(component.value)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "hang":
            threading.Event().wait()
        elif how == "fail":
            raise OSError(5, "injected fault")

    def slowed(self, result: ProbeResult) -> ProbeResult:
        """Return the result as a slow component would give it; unchanged without that fault."""
        if self._how.get(result.component.value) != "slow" or not result.figure:
            return result
        factor = SLOWER if result.unit == "ms" else 1 / SLOWER
        return msgspec.structs.replace(result, figure=result.figure * factor)


# ---- the host's memory and disk

MEMORY_BYTES = 32 << 20
"""Bytes per copy; more than processor caches hold."""
MEMORY_SECONDS = 0.25
"""Duration of the repeated copies; the fastest counts."""
DISK_BYTES = 16 << 20
_PATTERN = bytes(range(256)) * 4096


def memory() -> ProbeResult:
    """Measure the rate at which one thread reads and writes the host's memory."""
    source, target = bytearray(MEMORY_BYTES), memoryview(bytearray(MEMORY_BYTES))
    best = float("inf")
    until = time.perf_counter() + MEMORY_SECONDS
    while True:
        began = time.perf_counter()
        target[:] = source
        ended = time.perf_counter()
        best = min(best, ended - began)
        if ended >= until:
            break
    figure = 2 * MEMORY_BYTES / best / 1e9
    return ProbeResult(component=Component.MEMORY, figure=figure, unit="GB/s")


def disk(directory: Path) -> ProbeResult:
    """Measure the write rate to the disk of ``directory``, synced; read the data back and compare it.

    Raises:
        OSError: the directory is not writable, or the data read back differs.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        began = time.perf_counter()
        for _ in range(DISK_BYTES // len(_PATTERN)):
            file.write(_PATTERN)
        file.flush()
        os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        file.seek(0)
        while block := file.read(len(_PATTERN)):
            if block != _PATTERN:
                raise OSError(5, "the data read back is not the data written")
    return ProbeResult(component=Component.DISK, figure=DISK_BYTES / seconds / 1e6, unit="MB/s")
