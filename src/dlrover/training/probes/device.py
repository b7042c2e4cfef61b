"""Probes of accelerators, or of the CPU without any: matrix products and memory.

Import it only where PyTorch may be imported.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dlrover.accelerators import Vendor
from dlrover.spec.check import Component, ProbeResult, ProbeState

SECONDS = 0.3
"""Duration of a repeated operation; the fastest run counts."""
CPU_SIZE = 512
DEVICE_SIZE = 8192
"""Rows of the square matrices; a product takes milliseconds."""
COPY_BYTES = 1 << 30
"""Bytes per copy within an accelerator's memory."""


def usable(vendor: Vendor) -> str:
    """Return why PyTorch cannot use the vendor's devices on this machine; empty if it can."""
    if vendor.torch_module:
        try:
            importlib.import_module(vendor.torch_module)
        except ImportError as error:
            return f"{vendor.torch_module} cannot be imported: {error}"
    module = getattr(torch, vendor.torch_device, None)
    if module is None:
        return f"this PyTorch, {torch.__version__}, knows no device {vendor.torch_device}"
    return "" if module.is_available() else f"PyTorch {torch.__version__} finds none of its devices"


def built_for(vendor: Vendor) -> bool:
    """Return whether this PyTorch is built for the vendor's devices, so that finding none is a fault."""
    if vendor.torch_module:
        return True
    return vendor.torch_device != "cuda" or torch.version.cuda is not None


def probe(vendor: Vendor, index: int = -1) -> Iterator[ProbeResult]:
    """Probe each device, or only number ``index``, or the CPU.

    Raises:
        RuntimeError: a device fails.
    """
    kind = vendor.torch_device
    if kind == "cpu":
        # One thread: several would wait for each other where nodes share a machine's processors.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield _product(torch.device("cpu"), CPU_SIZE, torch.float32, lambda: None)
        finally:
            torch.set_num_threads(threads)
        return
    module = getattr(torch, kind)
    count = module.device_count()
    for number in range(count) if index < 0 else [index % count]:
        device = torch.device(kind, number)
        wait = functools.partial(module.synchronize, device)
        yield _product(device, DEVICE_SIZE, torch.bfloat16, wait)
        yield _copy(device, wait)
        module.empty_cache()


def _product(
    device: torch.device, size: int, dtype: torch.dtype, wait: Callable[[], Any]
) -> ProbeResult:
    generator = torch.Generator().manual_seed(1)
    left, right = (
        torch.rand(size, size, generator=generator, dtype=torch.float32).to(device, dtype)
        for _ in range(2)
    )
    first = left @ right
    again = left @ right
    wait()
    best = _best(lambda: torch.matmul(left, right, out=again), wait)
    name = "" if device.type == "cpu" else str(device)
    if not bool(torch.equal(first, again)):
        message = "the same product of matrices differs between two runs"
        failed = ProbeState.FAILED
        return ProbeResult(component=Component.DEVICE, name=name, state=failed, message=message)
    figure = 2 * size**3 / best / 1e9
    return ProbeResult(component=Component.DEVICE, name=name, figure=figure, unit="GFLOP/s")


def _copy(device: torch.device, wait: Callable[[], Any]) -> ProbeResult:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = _best(lambda: target.copy_(source), wait)
    figure = 2 * COPY_BYTES / best / 1e9
    return ProbeResult(component=Component.MEMORY, name=str(device), figure=figure, unit="GB/s")


def _best(work: Callable[[], Any], wait: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of several runs."""
    best = float("inf")
    until = time.perf_counter() + SECONDS
    while True:
        began = time.perf_counter()
        work()
        wait()
        ended = time.perf_counter()
        best = min(best, ended - began)
        if ended >= until:
            return best
