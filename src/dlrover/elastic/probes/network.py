"""The probe of the network between two nodes: they add up an array, as training does with gradients.

Import it where PyTorch may be imported.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dlrover._util.accelerators import Vendor
from dlrover.spec.check import CheckOrder, Component, ProbeResult, ProbeState

HOST_BYTES = 4 << 20
DEVICE_BYTES = 64 << 20
"""Size of the array, in the host's memory and in an accelerator's."""
RUNS = 30
"""How often it is added up; the fastest one counts."""


def probe(
    order: CheckOrder, node: int, vendor: Vendor, seconds: float, store: Any = None, index: int = 0
) -> ProbeResult:
    """How long it takes to add up an array with the other nodes of the group.

    ``store`` is used if there is one; else the group's first member opens one.

    Raises:
        RuntimeError: the nodes do not find each other, or what they add up does not arrive.
    """
    limit = timedelta(seconds=seconds)
    rank, size = order.members.index(node), len(order.members)
    others = ", ".join(f"node {member}" for member in order.members if member != node)
    if store is None:
        store = _open_store(order, rank, limit)
    # The store of a job lives on: each group has its own names in it.
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
    """The device and the library to use.

    They are the processors' where members share an accelerator: its library refuses that.
    """
    if len(set(hosts)) < len(hosts) or any(host.startswith("cpu ") for host in hosts):
        return torch.device("cpu"), "gloo"
    device = torch.device(vendor.torch_device, index)
    getattr(torch, vendor.torch_device).set_device(device)
    return device, vendor.backend


def _add_up(device: torch.device, rank: int, size: int) -> tuple[float, bool]:
    """Seconds of the fastest run, and whether all sums were right."""
    elements = (HOST_BYTES if device.type == "cpu" else DEVICE_BYTES) // 4
    best, right = float("inf"), True
    for _ in range(RUNS):
        array = torch.full((elements,), float(rank + 1), device=device)
        dist.all_reduce(torch.ones(1, device=device))  # nobody is to be waited for in what follows
        _wait(device)
        began = time.perf_counter()
        dist.all_reduce(array)
        _wait(device)
        best = min(best, time.perf_counter() - began)
        right = right and bool((array == size * (size + 1) / 2).all())
    return best, right


def _wait(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)
