"""The network probe: nodes sum an array together, as training does with gradients.

Import it only where PyTorch may be imported.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dlrover.accelerators import Vendor
from dlrover.spec.check import CheckOrder, Component, ProbeResult, ProbeState

HOST_BYTES = 4 << 20
DEVICE_BYTES = 64 << 20
"""Size of the array, in host memory and in accelerator memory."""
RUNS = 30
"""Number of sums; the fastest counts."""


def probe(
    order: CheckOrder, node: int, vendor: Vendor, seconds: float, store: Any = None, index: int = 0
) -> ProbeResult:
    """Measure the time to sum an array with the other nodes of the group.

    Without a ``store``, the group's first member opens one.

    Raises:
        RuntimeError: the nodes cannot reach each other, or a sum does not complete.
    """
    limit = timedelta(seconds=seconds)
    rank, size = order.members.index(node), len(order.members)
    others = ", ".join(f"node {member}" for member in order.members if member != node)
    if store is None:
        store = _open_store(order, rank, limit)
    # A job's store outlives the check, so each group uses its own names in it.
    names = dist.PrefixStore(f"check/{order.check}/{order.round}/{order.members[0]}", store)
    names.set_timeout(limit)
    names.set(f"host/{rank}", f"{vendor.torch_device} {index} {socket.gethostname()}")
    try:
        hosts = [names.get(f"host/{member}").decode() for member in range(size)]
    except RuntimeError:
        raise RuntimeError(f"{others} did not come within {seconds:.0f} s") from None
    device, backend = _means(hosts, vendor, index)
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", names), rank=rank, world_size=size, timeout=limit
    )
    try:
        best, right = _add_up(device, rank, size)
    finally:
        dist.destroy_process_group()
    if not right:
        message = f"the sum with {others} is wrong"
        failed = ProbeState.FAILED
        return ProbeResult(component=Component.NETWORK, name=others, state=failed, message=message)
    return ProbeResult(component=Component.NETWORK, name=others, figure=1000 * best, unit="ms")


def _open_store(order: CheckOrder, rank: int, limit: timedelta) -> Any:
    address, port = order.store_addr, order.store_port
    try:
        return dist.TCPStore(
            address, port, is_master=rank == 0, timeout=limit, wait_for_workers=False
        )
    except RuntimeError as error:
        verb = "open" if rank == 0 else "reach"
        why = str(error).partition("\n")[0][:80]
        raise RuntimeError(f"cannot {verb} {address}:{port} ({why})") from error


def _means(hosts: Sequence[str], vendor: Vendor, index: int) -> tuple[torch.device, str]:
    """Return the device and the communication library to use.

    Members that share an accelerator use the CPU: the accelerator's library refuses such sharing.
    """
    if len(set(hosts)) < len(hosts) or any(host.startswith("cpu ") for host in hosts):
        return torch.device("cpu"), "gloo"
    device = torch.device(vendor.torch_device, index)
    getattr(torch, vendor.torch_device).set_device(device)
    return device, vendor.backend


def _add_up(device: torch.device, rank: int, size: int) -> tuple[float, bool]:
    """Return the seconds of the fastest run, and whether all sums were right."""
    elements = (HOST_BYTES if device.type == "cpu" else DEVICE_BYTES) // 4
    best, right = float("inf"), True
    for _ in range(RUNS):
        array = torch.full((elements,), float(rank + 1), device=device)
        dist.all_reduce(torch.ones(1, device=device))  # synchronize the nodes before the timed sum
        _wait(device)
        began = time.perf_counter()
        dist.all_reduce(array)
        _wait(device)
        best = min(best, time.perf_counter() - began)
        right = right and bool((array == size * (size + 1) / 2).all())
    return best, right


def _wait(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
