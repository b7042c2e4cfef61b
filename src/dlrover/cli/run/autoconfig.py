"""``--auto-config``: nodes and workers chosen from the cluster and the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrover._util import cgroup
from dlrover.cli.run.nproc import ACCELERATORS
from dlrover.errors import ConfigurationError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

CHECKED_NODES = 4
"""Least number of nodes that are checked before training: one bad node stops all of them."""
_COUNTS = (
    "NODE_NUM",  # the operator sets it in the pods of an ElasticJob
    "SLURM_STEP_NUM_NODES",  # srun; under sbatch alone, only this node of the job runs anything
    "LWS_GROUP_SIZE",  # a Kubernetes LeaderWorkerSet
)


def apply(args: argparse.Namespace, environ: Mapping[str, str], probe: Callable[[str], int]) -> str:
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
        args.nnodes, why = _nodes(environ)
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


def _nodes(environ: Mapping[str, str]) -> tuple[str, str]:
    for name in _COUNTS:
        text = environ.get(name, "")
        if text:
            if not text.isdecimal() or int(text) < 1:
                raise ConfigurationError(
                    f"{name}={text} is no number of nodes for --auto-config; give --nnodes."
                )
            return str(int(text)), name
    return "1", "no cluster says otherwise"


def _workers(probe: Callable[[str], int]) -> tuple[str, str]:
    count = probe(ACCELERATORS)
    if count:
        return str(count), "accelerators" if count > 1 else "accelerator"
    count = cgroup.processors()
    return str(count), "processors, no accelerator" if count > 1 else "processor, no accelerator"
