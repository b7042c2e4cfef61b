"""CPU binding of workers under ``--numa-binding``, which keeps a worker's memory near its device.

The modes are torchrun's. `read_topology` and `device_numa_nodes` read sysfs, and `plan` decides.
The worker's process calls ``os.sched_setaffinity`` itself; no other program is needed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from dlrover.errors import ConfigurationError, InfrastructureError

SYSFS = Path("/sys")

CpuSet = frozenset[int]


class Topology(msgspec.Struct, frozen=True, kw_only=True):
    """The CPUs of one machine, by number, grouped by the hardware that they share."""

    nodes: dict[int, CpuSet]
    """CPUs of each NUMA node; empty for a node with memory only."""
    sockets: frozenset[CpuSet]
    cores: frozenset[CpuSet]
    """Hardware threads of each physical core."""
    caches: frozenset[CpuSet]
    """CPUs of each last-level cache, that is of each core complex."""
    allowed: CpuSet
    """CPUs that this process may use; in a container, often fewer than the machine has."""

    def allowed_on(self, node: int) -> CpuSet:
        """Return the CPUs of ``node`` that this process may use; none if the node does not exist."""
        return self.nodes.get(node, frozenset()) & self.allowed


def plan(
    mode: str, local_rank: int, topology: Topology, device_nodes: Sequence[int]
) -> frozenset[int]:
    """Return the CPUs to which the worker ``local_rank`` is bound.

    Args:
        mode: ``node`` (the NUMA node of the worker's device), ``socket`` (all nodes of that node's
            socket), ``exclusive`` (the node's physical cores, divided evenly among its devices)
            or ``core-complex`` (one last-level cache of the node; its devices get different ones
            while there are enough).
        local_rank: The worker, which uses the device of the same number.
        topology: The machine.
        device_nodes: The NUMA node of each device; see `device_numa_nodes`.

    Raises:
        ConfigurationError: The mode is unknown, or this machine cannot be divided in that way.
    """
    if mode not in _MODES:
        raise ConfigurationError(
            f"--numa-binding is {mode!r}; accepted are {', '.join(map(repr, _MODES))}."
        )
    if local_rank not in range(len(device_nodes)):
        raise ConfigurationError(
            f"--numa-binding is {mode!r}, which needs a device for each worker, "
            f"but local rank {local_rank} has none of the {len(device_nodes)} devices."
        )
    if not topology.allowed_on(device_nodes[local_rank]):
        raise ConfigurationError(
            f"--numa-binding is {mode!r}, but this process may use no CPU of NUMA node "
            f"{device_nodes[local_rank]}, the node of local rank {local_rank}'s device; "
            "allow some of its CPUs (cpuset, taskset) or leave the flag out."
        )
    return _MODES[mode](local_rank, topology, device_nodes)


def device_numa_nodes(
    pci_addresses: Sequence[str],
    local_world_size: int,
    topology: Topology,
    root: Path = SYSFS,
) -> tuple[int, ...]:
    """Return the NUMA node of each device of this machine, by local rank.

    Without devices, assign the workers themselves to the NUMA nodes in turn.

    Args:
        pci_addresses: Addresses as in sysfs (``0000:dc:00.0``); device i belongs to local rank i.
        local_world_size: Workers on this machine; used only without devices.
        topology: The machine.
        root: Where sysfs is mounted.

    Raises:
        InfrastructureError: The NUMA node of a device cannot be read from sysfs.
    """
    if pci_addresses:
        return tuple(_device_node(address, root) for address in pci_addresses)
    nodes = [node for node in sorted(topology.nodes) if topology.allowed_on(node)]
    return tuple(nodes[rank % len(nodes)] for rank in range(local_world_size))


def read_topology(root: Path = SYSFS, allowed: Iterable[int] | None = None) -> Topology:
    """Read the machine's topology from sysfs.

    A virtual machine may hide parts of it. Without NUMA nodes, all CPUs form node 0; without
    packages, one socket; without caches, a socket is one core complex; a CPU without siblings is
    a core.

    Args:
        root: Where sysfs is mounted.
        allowed: CPUs that may be used; by default this process's affinity.
    """
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    nodes = {
        int(path.name.removeprefix("node")): _parse_cpus((path / "cpulist").read_text())
        for path in (root / "devices/system/node").glob("node[0-9]*")
    }
    if not any(nodes.values()):
        nodes = {0: usable}
    cpus = frozenset[int]().union(*nodes.values())
    directories = {cpu: root / f"devices/system/cpu/cpu{cpu}" for cpu in cpus}
    packages: dict[str, set[int]] = {}
    for cpu, directory in directories.items():
        package = _read(directory / "topology/physical_package_id")
        packages.setdefault(package, set()).add(cpu)
    sockets = {cpu: frozenset(package) for package in packages.values() for cpu in package}
    return Topology(
        nodes=nodes,
        sockets=frozenset(sockets.values()),
        cores=frozenset(
            _parse_cpus(_read(directory / "topology/thread_siblings_list")) or frozenset({cpu})
            for cpu, directory in directories.items()
        ),
        caches=frozenset(
            _last_level_cache(directory / "cache") or sockets[cpu]
            for cpu, directory in directories.items()
        ),
        allowed=usable,
    )


def _bind_node(local_rank: int, topology: Topology, device_nodes: Sequence[int]) -> CpuSet:
    return topology.allowed_on(device_nodes[local_rank])


def _bind_socket(local_rank: int, topology: Topology, device_nodes: Sequence[int]) -> CpuSet:
    anchor = min(topology.allowed_on(device_nodes[local_rank]))
    socket = next(socket for socket in topology.sockets if anchor in socket)
    usable = (topology.allowed_on(node) for node in topology.nodes)
    return frozenset[int]().union(*(cpus for cpus in usable if cpus and min(cpus) in socket))


def _bind_exclusive(local_rank: int, topology: Topology, device_nodes: Sequence[int]) -> CpuSet:
    position, count = _position_on_node(local_rank, device_nodes)
    cores = _split(topology.allowed_on(device_nodes[local_rank]), topology.cores)
    if len(cores) < count:
        raise ConfigurationError(
            f"--numa-binding is 'exclusive', but NUMA node {device_nodes[local_rank]} has "
            f"{count} devices and only {len(cores)} physical cores that this process may use; "
            "allow it more of them or choose 'node'."
        )
    share, extra = divmod(len(cores), count)  # the first `extra` devices get one more core
    start = position * share + min(position, extra)
    return frozenset[int]().union(*cores[start : start + share + (position < extra)])


def _bind_core_complex(local_rank: int, topology: Topology, device_nodes: Sequence[int]) -> CpuSet:
    position, _ = _position_on_node(local_rank, device_nodes)
    complexes = _split(topology.allowed_on(device_nodes[local_rank]), topology.caches)
    largest_first = sorted(complexes, key=len, reverse=True)  # stable: the lowest numbers first
    return largest_first[position % len(largest_first)]


_MODES: dict[str, Callable[[int, Topology, Sequence[int]], CpuSet]] = {
    "node": _bind_node,
    "socket": _bind_socket,
    "exclusive": _bind_exclusive,
    "core-complex": _bind_core_complex,
}


def _position_on_node(local_rank: int, device_nodes: Sequence[int]) -> tuple[int, int]:
    """Return the device's index among the devices of its NUMA node, and the number of these devices."""
    node = device_nodes[local_rank]
    return device_nodes[:local_rank].count(node), device_nodes.count(node)


def _split(cpus: CpuSet, groups: Iterable[CpuSet]) -> list[CpuSet]:
    """Split ``cpus`` by the groups that they belong to, ordered by each group's lowest number."""
    parts = (group & cpus for group in sorted(groups, key=min))
    return [part for part in parts if part]


def _device_node(address: str, root: Path) -> int:
    path = root / "bus/pci/devices" / address / "numa_node"
    try:
        node = int(path.read_text())
    except (OSError, ValueError) as error:
        raise InfrastructureError(
            f"The NUMA node of the device at PCI address {address!r} cannot be read from {path}: "
            f"{error}."
        ) from error
    return max(node, 0)  # -1: the firmware names no node, as is usual if there is only node 0


def _last_level_cache(directory: Path) -> CpuSet:
    """Return the CPUs that share the highest-level data cache; none if caches are hidden."""
    levels = {
        int(_read(index / "level")): _parse_cpus(_read(index / "shared_cpu_list"))
        for index in directory.glob("index[0-9]*")
        if _read(index / "type") in {"Data", "Unified"}
    }
    return levels[max(levels)] if levels else frozenset()


def _read(path: Path) -> str:
    """Return the file's text, stripped; empty if the file does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().strip()
    return ""


def _parse_cpus(text: str) -> CpuSet:
    """Parse a CPU list in the kernel's format, such as ``0-2,4``."""
    cpus: set[int] = set()
    for item in filter(None, text.strip().split(",")):
        first, _, last = item.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)
