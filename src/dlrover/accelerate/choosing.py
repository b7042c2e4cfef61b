"""The strategy of a model that was given none: the fastest one of the planner that can be applied here."""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from dlrover.accelerate import strategies
from dlrover.accelerate.anatomy import Anatomy
from dlrover.errors import ConfigurationError
from dlrover.planning.parallel.accelerators import ACCELERATORS
from dlrover.planning.parallel.records import Cluster, Strategy, Transformer
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


class StrategyTask(NamedTuple):
    """What a strategy is chosen for."""

    anatomy: Anatomy
    sequence: int
    """Tokens of a sequence."""
    global_batch: int
    """Sequences of a step, on all ranks together."""
    excluded: tuple[str, ...] = ()
    """Methods that must not be used."""
    included: tuple[str, ...] | None = None
    """Methods that alone may be used; None: all."""

    def unwanted(self) -> set[str]:
        """Return the methods that must not be used.

        Raises:
            ConfigurationError: a method is unknown.
        """
        for name in [*self.excluded, *(self.included or ())]:
            if name not in USES:
                raise ConfigurationError(
                    f"excluded or included has {name!r}; accepted are {', '.join(USES)}."
                )
        others = set() if self.included is None else USES.keys() - set(self.included)
        return set(self.excluded) | others


def nothing_fits(task: StrategyTask, cluster: Cluster) -> ConfigurationError:
    """Return the error for a task for which no strategy fits."""
    return ConfigurationError(
        f"No strategy fits {cluster.size} x {cluster.accelerator} with a global batch of {task.global_batch} sequences"
        f" of {task.sequence} tokens without {', '.join(sorted(task.unwanted())) or 'any exclusion'};"
        " dlrover strategy tells why."
    )


def within(task: StrategyTask, cluster: Cluster, given: Strategy) -> Strategy:
    """Return the fastest strategy with the given one's degrees tp, pp, cp and ep, and with what is not planned.

    Raises:
        ConfigurationError: a method is unknown, or nothing fits.
    """
    for one, _ in candidates(task, cluster):
        if one.degrees == given.degrees:
            return replace(one, **_own(given))
    raise nothing_fits(task, cluster)


def candidates(task: StrategyTask, cluster: Cluster) -> Iterator[tuple[Strategy, float]]:
    """Yield the strategies that can be applied, with their seconds per step, the fastest first.

    There is one for each choice of the degrees tp, pp, cp and ep. A model without a known shape is sharded over all
    ranks, in an unknown time, 0.

    Raises:
        ConfigurationError: a method is unknown.
    """
    unwanted = task.unwanted()
    model = task.anatomy.transformer
    found: Iterator[tuple[Strategy, float]]
    if model is None:
        found = iter([(_without_a_plan(task.anatomy, cluster.size), 0.0)])
    else:
        model = replace(model, autocast=True)
        even = _planned(model, cluster, task.sequence, task.global_batch)
        found = heapq.merge(even, _uneven(model, cluster, task), key=lambda each: each[1])
    seen: set[tuple[int, ...]] = set()
    for one, seconds in found:
        if "amp_native" in unwanted:
            one = replace(one, precision="fp32")  # noqa: PLW2901
        if one.degrees in seen or any(USES[name](one) for name in unwanted):
            continue
        if _applies(one, task.anatomy, cluster.size):
            seen.add(one.degrees)
            yield one, seconds


def _without_a_plan(anatomy: Anatomy, size: int) -> Strategy:
    known = "The model's config describes no transformer"
    if anatomy.scalar:
        _log.info("%s: each rank has its states, for %s has no dimension.", known, anatomy.scalar)
        return Strategy(dp_replicate=size)
    _log.info("%s: its states are sharded over all ranks.", known)
    return Strategy(dp_shard=size)


def _planned(
    model: Transformer, cluster: Cluster, sequence: int, global_batch: int
) -> list[tuple[Strategy, float]]:
    found = search(model, cluster, sequence=sequence, global_batch=global_batch, limit=1000)
    return [(one, prediction.step_seconds) for one, prediction in found]


def _uneven(
    model: Transformer, cluster: Cluster, task: StrategyTask
) -> list[tuple[Strategy, float]]:
    """Return strategies whose data-parallel ranks do not divide the global batch: some have a sample less, or none.

    A step takes as long as with the next multiple of these ranks.
    """
    size, batch = cluster.size, task.global_batch
    degrees = [data for data in range(1, size + 1) if size % data == 0 and batch % data]
    found = [
        (one, seconds)
        for data in degrees
        for one, seconds in _planned(model, cluster, task.sequence, -(-batch // data) * data)
        if one.dp == data and one.pp == 1
    ]
    return sorted(found, key=lambda each: each[1])


def _applies(one: Strategy, anatomy: Anatomy, world_size: int) -> bool:
    try:
        strategies.check(one, anatomy, world_size)
    except ConfigurationError as error:
        _log.debug("A strategy was passed over: %s", error)
        return False
    return True


def _own(one: Strategy) -> dict[str, Any]:
    """Return what the planner does not choose."""
    names = (
        "precision",
        "context",
        "schedule",
        "tensor_rules",
        "blocks",
        "sequence_parallel",
        "compile",
    )
    return {name: getattr(one, name) for name in names}


def cluster_of(accelerator: str, world_size: int, per_node: int) -> Cluster:
    """Return the cluster of a world."""
    near = math.gcd(per_node, world_size)
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
