"""Functions of ``torch.distributed`` that torch does not carry out by one collective of the managed group.

Those for objects are several collectives in torch, between which a rank can be lost; here each is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.training.replicas.managed import ManagedGroup
from dlrover.training.replicas.rows import RowGroup


def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Carry out a function of ``torch.distributed`` in a managed group, others as torch does."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if original.__name__ == "new_group":
        return original(**{**given, "backend": None})  # another one would not outlive a loss
    group = given.get("group") or dist.group.WORLD
    if isinstance(group, RowGroup) and original.__name__.endswith(("_object", "_object_list")):
        with group.carried_out():  # sizes of objects must be those of their senders
            return original(*args, **kwargs)
    if not isinstance(group, ManagedGroup):
        return original(*args, **kwargs)
    function = _FUNCTIONS.get(original.__name__)
    if function is None and (row := group.as_row()) is not None:
        return original(**{**given, "group": row})
    if function is None:
        raise ConfigurationError(
            f"--survive: torch.distributed.{original.__name__} among these ranks cannot survive the loss of one; a"
            " model must be whole on each rank (DistributedDataParallel) or on each row of ranks (HSDP)."
        )
    return function(group, given)


def _gather(group: ManagedGroup, given: Mapping[str, Any]) -> Any:
    output, own = list(given.values())[:2]
    work = group._allgather_base(output, own)  # noqa: SLF001
    return work if given["async_op"] else None


def _broadcast_objects(group: ManagedGroup, given: Mapping[str, Any]) -> None:
    objects = given["object_list"]
    found = group.exchange(objects, _rank(group, given, "src"))
    objects[:] = objects if found is None else found


def _all_gather_objects(group: ManagedGroup, given: Mapping[str, Any]) -> None:
    given["object_list"][:] = group.gather_objects(given["obj"])


def _gather_objects(group: ManagedGroup, given: Mapping[str, Any]) -> None:
    found = group.gather_objects(given["obj"])
    if group.own == _rank(group, given, "dst"):
        given["object_gather_list"][:] = found


def _scatter_objects(group: ManagedGroup, given: Mapping[str, Any]) -> None:
    source, every = _rank(group, given, "src"), given["scatter_object_input_list"]
    found = group.exchange((every,), source)
    if found is not None:
        (every,) = found
        if every is None:
            raise InfrastructureError(
                f"--survive: rank {source}, whose objects scatter_object_list distributes, is lost; all ranks start again."
            )
    if every:
        given["scatter_object_output_list"][0] = every[group.rank()]


def _rank(group: ManagedGroup, given: Mapping[str, Any], name: str) -> int:
    """Return the rank that a function names, as numbered in the world."""
    if given[name] is not None:
        return int(given[name])
    return group.ranks[given[f"group_{name}"] or 0]


_FUNCTIONS: dict[str, Callable[[ManagedGroup, Mapping[str, Any]], Any]] = {
    "all_gather_into_tensor": _gather,
    "all_gather_single": _gather,
    "broadcast_object_list": _broadcast_objects,
    "all_gather_object": _all_gather_objects,
    "gather_object": _gather_objects,
    "scatter_object_list": _scatter_objects,
}
