"""Options for a job's nodes: ``--nnodes``, ``--local-nodes``, their size, ``--servers``, ``--auto-config``."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence

from dlrover._util import cgroup
from dlrover.cli.run.nproc import ACCELERATORS
from dlrover.errors import ConfigurationError
from dlrover.kubernetes.resources.quantities import quantity
from dlrover.spec.node import NodeLimits
from dlrover.spec.words import gib

EMBEDDING_SERVER = "dlrover.embedding"
"""Module that ``--embedding-servers`` runs."""
LEAST_MEMORY = 128 << 20
"""Least memory of a node in bytes; the node's processes other than workers take most of it."""
LEAST_CPU = 0.05
"""Least CPU of a node in cores."""
CHECKED_NODES = 4
"""Least number of nodes that are checked before training: one bad node stops all of them."""
_COUNTS = (
    "NODE_NUM",  # the operator sets it in the pods of an ElasticJob
    "SLURM_STEP_NUM_NODES",  # srun; under sbatch alone, only this node of the job runs anything
    "LWS_GROUP_SIZE",  # a Kubernetes LeaderWorkerSet
)


def parse_nnodes(text: str) -> tuple[int, int]:
    """Parse ``N`` or ``MIN:MAX`` into the least and the most number of nodes."""
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ConfigurationError(f"--nnodes {text}: must be a whole number N, or two as MIN:MAX.")
    return _bounds("--nnodes", text, numbers, "a job needs at least 1 node")


def _bounds(flag: str, text: str, numbers: Sequence[int], needs: str) -> tuple[int, int]:
    """Return the least and the most of one or two numbers; ``needs`` says why they begin with 1."""
    least, most = numbers[0], numbers[-1]
    if least < 1:
        raise ConfigurationError(f"{flag} {text}: {needs}.")
    if least > most:
        raise ConfigurationError(
            f"{flag} {text}: the minimum, {least}, is greater than the maximum, {most}."
        )
    return least, most


def bounds(args: argparse.Namespace, environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the least and the most number of nodes after checking them against the other options.

    Without ``--nnodes``, a node of a master elsewhere does not know them: the master does.
    """
    local, unit = args.local_nodes, args.node_unit
    if local < 0:
        raise ConfigurationError(f"--local-nodes {local}: must be a whole number, 1 or more.")
    if unit < 1:
        raise ConfigurationError(f"--node-unit {unit}: must be a whole number, 1 or more.")
    if local and "nnodes" not in args.given:
        least = most = local
        bounds = f"--local-nodes {local}"
    else:
        least, most = parse_nnodes(args.nnodes)
        bounds = f"--nnodes {args.nnodes}"
    if local and not least <= local <= most:
        raise ConfigurationError(
            f"--local-nodes {local}: {bounds} requests {_range(least, most)} nodes."
        )
    available = local or most
    if available < most:
        bounds += f" with --local-nodes {local}"
    if available - available % unit < least and not _is_sized_elsewhere(args, environ):
        raise ConfigurationError(
            f"--node-unit {unit}: {_range(least, available)} nodes ({bounds}) include no multiple "
            f"of {unit}."
        )
    return least, most


def check_auto_scale(
    args: argparse.Namespace, environ: Mapping[str, str], max_nodes: int, has_choice: bool
) -> None:
    """Refuse ``--auto-scale`` without a range of sizes, or where DLRover cannot start nodes."""
    if not has_choice and not _is_sized_elsewhere(args, environ):
        servers = f" and {args.servers} servers" if args.servers else ""
        raise ConfigurationError(
            f"--auto-scale: {max_nodes} nodes{servers} leave no choice; give a range, as "
            f"--nnodes 1:{max(max_nodes, 2)}."
        )
    if not args.local_nodes and "DLROVER_MASTER_ADDR" not in environ:
        raise ConfigurationError(
            "--auto-scale: DLRover must be able to start nodes; give --local-nodes N, the number to start "
            "with on this machine, or run the job on Kubernetes."
        )


def _is_sized_elsewhere(args: argparse.Namespace, environ: Mapping[str, str]) -> bool:
    return "DLROVER_MASTER_ADDR" in environ and "nnodes" not in args.given


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least} to {most}"


def with_embedding_servers(args: argparse.Namespace) -> argparse.Namespace:
    """Return the options that ``--embedding-servers`` stands for.

    Raises:
        ConfigurationError: one of them is given, too.
    """
    for name in ("servers", "server_module"):
        if getattr(args, name):
            flag = "--" + name.replace("_", "-")
            raise ConfigurationError(
                f"--embedding-servers {args.embedding_servers}: excludes {flag} {getattr(args, name)}."
            )
    changed = vars(args) | {
        "servers": args.embedding_servers,
        "local_nodes": args.local_nodes or 1,
        "server_failover": "instance",
        "server_module": EMBEDDING_SERVER,
    }
    return argparse.Namespace(**changed)


def spares(args: argparse.Namespace, most: int, *, standalone: bool) -> tuple[int, bool]:
    """Return the number of spares that ``--spares`` asks for, and whether the job chooses it.

    Raises:
        ConfigurationError: the text is malformed, there are more spares than nodes, or no node could be one.
    """
    text = args.spares
    if text in ("", "0"):
        return 0, False
    if text != "auto" and not re.fullmatch(r"[0-9]{1,6}", text):
        raise ConfigurationError(f"--spares {text}: must be auto or a whole number, 0 or more.")
    if args.chief:
        raise ConfigurationError(
            f"--spares {text}: with --chief, each node is a world by itself and none waits for another."
        )
    if standalone and not args.local_nodes:
        raise ConfigurationError(
            f"--spares {text}: the job runs on one node; give --local-nodes N for several on this machine."
        )
    if text == "auto":
        return 0, True
    if int(text) > most:
        raise ConfigurationError(
            f"--spares {text}: must be at most the number of nodes, {most}; more could not be used."
        )
    return int(text), False


def server_bounds(text: str, local_nodes: int) -> tuple[int, int]:
    """Return the least and the most number of parameter servers; zeros if ``text`` is empty.

    Args:
        text: ``MAX`` or ``MIN:MAX``.
        local_nodes: Value of ``--local-nodes``; 0 if not given.

    Raises:
        ConfigurationError: ``text`` is malformed, or DLRover could not start the servers.
    """
    if not text:
        return 0, 0
    if not re.fullmatch(r"([0-9]{1,6}:)?[0-9]{1,6}", text):
        raise ConfigurationError(
            f"--servers {text}: must be a whole number of servers, or two as MIN:MAX."
        )
    least, most = _bounds(
        "--servers",
        text,
        [*map(int, text.split(":"))],
        "must be 1 or more; leave it out for no servers",
    )
    if not local_nodes:
        raise ConfigurationError(
            f"--servers {text}: DLRover must be able to start nodes; give --local-nodes N, the number of "
            "workers' nodes on this machine, or name the servers in spec.replicaSpecs.ps of an ElasticJob on "
            "Kubernetes."
        )
    return least, most


def other_nodes(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Return the number of nodes beside workers and servers: the chief and the evaluators.

    Raises:
        ConfigurationError: the options contradict each other, or DLRover could not start these nodes.
    """
    if args.evaluators < 0:
        raise ConfigurationError(f"--evaluators {args.evaluators}: must be 0 or a positive number.")
    if not args.chief:
        if args.evaluators:
            raise ConfigurationError(
                f"--evaluators {args.evaluators}: evaluators run beside a chief; give --chief too."
            )
        return 0
    if args.auto_scale or args.node_unit > 1 or "nnodes" in args.given:
        raise ConfigurationError(
            "--chief: the chief alone is the world, so --nnodes, --node-unit and --auto-scale do not apply."
        )
    if not args.local_nodes and "DLROVER_MASTER_ADDR" not in environ:
        raise ConfigurationError(
            "--chief: DLRover must be able to start nodes; give --local-nodes N, the number of workers on this "
            "machine, or name the chief in spec.replicaSpecs.chief of an ElasticJob on Kubernetes."
        )
    return 1 + int(args.evaluators)


def check_instances(args: argparse.Namespace, environ: Mapping[str, str]) -> None:
    """Refuse what nodes without a common world cannot have.

    Raises:
        ConfigurationError: an option is about that world, or DLRover could not start the nodes.
    """
    given = {
        "--chief": args.chief,
        "--servers": args.servers,
        "--auto-scale": args.auto_scale,
        "--node-unit": args.node_unit > 1,
        "--nnodes": "nnodes" in args.given and (not args.platform or ":" in args.nnodes),
        "--network-check": args.network_check or args.exclude_straggler or args.precheck,
    }
    for flag, is_set in given.items():
        if is_set:
            raise ConfigurationError(
                f"--instances: each node is a world by itself, so {flag} does not apply."
            )
    if not args.local_nodes and "DLROVER_MASTER_ADDR" not in environ:
        raise ConfigurationError(
            "--instances: give --local-nodes N, the number of instances on this machine."
        )


# Size of a local node


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
            f"--node-memory {gib(size.memory)}: {nodes} nodes need {gib(nodes * size.memory)}, "
            f"and this machine has {gib(total)}."
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


# --auto-config


def auto_config(
    args: argparse.Namespace, environ: Mapping[str, str], probe: Callable[[str], int]
) -> str:
    """Set the options missing from ``args``, a namespace of `dlrover.cli.run.arguments.build_parser`.

    Args:
        args: namespace whose ``nnodes``, ``nproc_per_node`` and ``network_check`` may change.
        environ: environment in which a cluster gives the number of nodes.
        probe: counts devices, as `dlrover.cli.run.nproc.probe_devices` does.

    Returns:
        A sentence that says what was chosen, and why.

    Raises:
        ConfigurationError: a cluster's variable does not hold a number of nodes.
    """
    chosen = []
    if "nnodes" not in args.given and not args.local_nodes:
        args.nnodes, why = _cluster_nodes(environ)
        chosen.append(f"--nnodes {args.nnodes} ({why})")
    if "nproc_per_node" not in args.given:
        args.nproc_per_node, why = _workers(probe)
        chosen.append(f"--nproc-per-node {args.nproc_per_node} ({why})")
    least = args.nnodes.partition(":")[0]
    many = not args.local_nodes and least.isdecimal() and int(least) >= CHECKED_NODES
    if many and "network_check" not in args.given and "precheck" not in args.given:
        args.network_check = True
        chosen.append(f"--network-check ({least} nodes)")
    return f"--auto-config chose {', '.join(chosen) or 'nothing: all was given'}."


def _cluster_nodes(environ: Mapping[str, str]) -> tuple[str, str]:
    for name in _COUNTS:
        text = environ.get(name, "")
        if text:
            if not text.isdecimal() or int(text) < 1:
                raise ConfigurationError(
                    f"{name}={text} is not a number of nodes for --auto-config; give --nnodes."
                )
            return str(int(text)), name
    return "1", "no cluster says otherwise"


def _workers(probe: Callable[[str], int]) -> tuple[str, str]:
    count = probe(ACCELERATORS)
    if count:
        return str(count), "accelerators" if count > 1 else "accelerator"
    count = cgroup.processors()
    return str(count), "processors, no accelerator" if count > 1 else "processor, no accelerator"
