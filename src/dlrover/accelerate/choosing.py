"""The strategy of a model that was given none: the fastest one of the planner that can be applied here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from dlrover.accelerate import checks
from dlrover.accelerate.anatomy import Anatomy
from dlrover.errors import ConfigurationError
from dlrover.planning.parallel.accelerators import ACCELERATORS
from dlrover.planning.parallel.records import Cluster, Strategy
from dlrover.planning.parallel.search import search

_log = logging.getLogger(__name__)

USES: Mapping[str, Callable[[Strategy], bool]] = {
    "zero1": lambda one: one.zero == 1 and one.dp_shard > 1,
    "zero2": lambda one: one.zero == 2 and one.dp_shard > 1,
    "fsdp": lambda one: one.zero == 3 and one.dp_shard > 1,
    "amp_native": lambda one: one.precision != "fp32",
    "tensor_parallel": lambda one: one.tp > 1,
    "pipeline_parallel": lambda one: one.pp > 1,
    "sequence_parallel": lambda one: one.cp > 1,
    "checkpoint": lambda one: one.recompute != "none",
    "native_dynamo": lambda one: one.compile,
}
"""Methods that may be excluded, and whether a strategy uses them."""
UNKNOWN_DEVICE = "h100-80"
"""Accelerator that is planned for where there is none."""


def choose(
    anatomy: Anatomy,
    cluster: Cluster,
    *,
    sequence: int,
    global_batch: int,
    excluded: Collection[str] = (),
    included: Collection[str] | None = None,
    within: Strategy | None = None,
) -> Strategy:
    """Return the planner's fastest strategy that can be applied to a model.

    A model without a known shape is sharded over all ranks. With ``within``, only strategies of its degrees count.

    Raises:
        ConfigurationError: a method is unknown, or nothing fits.
    """
    unwanted = _unwanted(excluded, included)
    if anatomy.transformer is None:
        _log.info("The model's config describes no transformer: its states are sharded over all ranks.")  # fmt: skip
        found: Iterable[Strategy] = [Strategy(dp_shard=cluster.size)]
    else:
        found = (
            one
            for one, _ in search(
                anatomy.transformer, cluster, sequence=sequence, global_batch=global_batch, limit=1000
            )
        )  # fmt: skip
    for one in found:
        if "amp_native" in unwanted:
            one = replace(one, precision="fp32")  # noqa: PLW2901
        if any(USES[name](one) for name in unwanted) or (
            within and _degrees(one) != _degrees(within)
        ):
            continue
        if _applies(one, anatomy, cluster.size):
            return one
    raise ConfigurationError(
        f"No strategy fits {cluster.size} x {cluster.accelerator} with a global batch of {global_batch} sequences"
        f" of {sequence} tokens without {', '.join(sorted(unwanted)) or 'any exclusion'}; dlrover strategy tells why."
    )


def _unwanted(excluded: Collection[str], included: Collection[str] | None) -> set[str]:
    for name in [*excluded, *(included or ())]:
        if name not in USES:
            raise ConfigurationError(
                f"excluded or included has {name!r}; accepted are {', '.join(USES)}."
            )
    return set(excluded) | (set() if included is None else USES.keys() - set(included))


def _applies(one: Strategy, anatomy: Anatomy, world_size: int) -> bool:
    try:
        checks.check(one, anatomy, world_size)
    except ConfigurationError as error:
        _log.debug("A strategy was passed over: %s", error)
        return False
    return True


def _degrees(one: Strategy) -> tuple[int, ...]:
    return one.dp_replicate, one.dp_shard, one.tp, one.pp, one.cp, one.ep


def cluster_of(accelerator: str, world_size: int, per_node: int) -> Cluster:
    """Return the cluster of a world."""
    near = min(per_node, world_size)
    return Cluster(accelerator=accelerator, nodes=world_size // near, per_node=near)


def accelerator_of(device: torch.device) -> str:
    """Return the name of a device in the planner's table, by its own name and memory.

    Raises:
        ConfigurationError: the table does not have it.
    """
    if device.type == "cpu":
        return UNKNOWN_DEVICE
    module: Any = torch.get_device_module(device)
    name = module.get_device_name(device).lower()
    gib = module.get_device_properties(device).total_memory / 2**30
    known = [key for key in ACCELERATORS if key.partition("-")[0] in name]
    if not known:
        raise ConfigurationError(
            f"The accelerator {name!r} is not in the planner's table; accepted as accelerator=... are"
            f" {', '.join(ACCELERATORS)}."
        )
    return min(known, key=lambda key: abs(ACCELERATORS[key].memory_gib - gib))
