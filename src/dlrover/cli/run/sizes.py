"""``--node-memory`` and ``--node-cpu``: size of each local node, checked against this machine."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from dlrover._util import cgroup
from dlrover.errors import ConfigurationError
from dlrover.kubernetes.resources.quantities import quantity
from dlrover.spec.node import NodeLimits

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

LEAST_MEMORY = 128 << 20
"""Least memory of a node in bytes; the node's processes other than workers take most of it."""
LEAST_CPU = 0.05
"""Least CPU of a node in cores."""


def node_size(args: argparse.Namespace, environ: Mapping[str, str], standalone: bool) -> NodeLimits:
    """Return the size of each node, from the command line.

    Raises:
        ConfigurationError: a size is malformed or too small, or no nodes start on this machine.
    """
    for flag, given in (("--node-memory", args.node_memory), ("--node-cpu", args.node_cpu)):
        here = standalone or args.local_nodes
        if given and (not here or environ.get("DLROVER_MASTER_ADDR")):
            raise ConfigurationError(
                f"{flag} {given}: limits nodes that are started on this machine; give --local-nodes N too."
            )
    memory = int(_number("--node-memory", args.node_memory, "bytes, as 512Mi or 2Gi are"))
    cpu = _number("--node-cpu", args.node_cpu, "cores, as 0.5, 500m or 2 are")
    if args.node_memory and memory < LEAST_MEMORY:
        raise ConfigurationError(
            f"--node-memory {args.node_memory}: must be {LEAST_MEMORY >> 20}Mi or more."
        )
    if args.node_cpu and cpu < LEAST_CPU:
        raise ConfigurationError(f"--node-cpu {args.node_cpu}: must be {LEAST_CPU:g} or more.")
    return NodeLimits(memory=memory, cpu=cpu)


def most_memory_factor(size: NodeLimits, nodes: int) -> float:
    """Return by how much the memory of ``nodes`` nodes can grow here, as a factor; 0 without a memory size.

    Raises:
        ConfigurationError: this machine cannot give the nodes their size.
    """
    if not size:
        return 0.0
    cores = cgroup.cores()
    if size.cpu > cores:
        raise ConfigurationError(f"--node-cpu {size.cpu:g}: this machine has {cores:g} cores.")
    total = machine_memory()
    if nodes * size.memory > total:
        raise ConfigurationError(
            f"--node-memory {_gib(size.memory)}: {nodes} nodes need {_gib(nodes * size.memory)}, "
            f"and this machine has {_gib(total)}."
        )
    from dlrover.platform import groups  # noqa: PLC0415 - only here

    try:
        groups.check()
    except ConfigurationError as error:
        flag = "--node-memory" if size.memory else "--node-cpu"
        raise ConfigurationError(f"{flag} cannot be used here. {error}") from error
    return total / nodes / size.memory if size.memory else 0.0


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of the container of this process."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    within = cgroup.memory()
    return total if within is None else min(total, within[1])


def _number(flag: str, text: str, accepted: str) -> float:
    if not text:
        return 0.0
    try:
        number = float(quantity(text))
    except ValueError:
        number = math.inf
    if not math.isfinite(number):
        raise ConfigurationError(f"{flag} {text}: must be a number of {accepted}.")
    return number


def _gib(amount: int) -> str:
    return f"{amount / (1 << 30):.3g}Gi"
