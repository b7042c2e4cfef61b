"""Conversion of a user's state to tensors and a skeleton."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import torch

from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.extent import Extent
from dlrover.checkpoint.machine.layout import ITEM_BYTES, Path, TensorPart, TensorSpec, name
from dlrover.errors import ConfigurationError

if TYPE_CHECKING:
    # Under their own names: other modules take them from here.
    from torch.distributed._shard.sharded_tensor import (
        ShardedTensor as ShardedTensor,  # noqa: PLC0414
    )
    from torch.distributed.tensor import DTensor as DTensor  # noqa: PLC0414
else:

    class _Late(type):
        """A class of PyTorch whose import takes a second: it has no instances before the program imports it."""

        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, getattr(sys.modules.get(cls.home), cls.__name__, ()))

    class DTensor(metaclass=_Late):
        """`torch.distributed.tensor.DTensor`."""

        home = "torch.distributed.tensor"

    class ShardedTensor(metaclass=_Late):
        """The tensor of ``FullyShardedDataParallel`` that is spread over ranks."""

        home = "torch.distributed._shard.sharded_tensor"


State = dict[str, Any]
"""Modules, optimizers, objects with ``state_dict``, tensors and plain values, in any nesting."""

DTYPES = {key: getattr(torch, key) for key in ITEM_BYTES if hasattr(torch, key)}
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
DTYPE_NAMES = {dtype: key for key, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor that is spread over ranks without ``DTensor``."""

    tensor: torch.Tensor
    whole: tuple[int, ...]
    """The shape of the whole tensor."""
    at: tuple[int, ...]
    """Start of the part in each dimension."""
    owner: int = -1
    """Lowest rank that has the same part; -1 if no other rank has it."""


Spread: TypeAlias = DTensor | Shard | ShardedTensor
"""Tensors that each rank has only a part of."""


@dataclass(frozen=True)
class Flat:
    """A state split into its live tensors and the packed tree."""

    tensors: list[torch.Tensor]
    """Tensors of the state; for spread ones, this rank's part."""
    paths: list[Path]
    spread: dict[int, Spread]
    """Spread values that tensors are parts of, by index of the tensor."""
    packed: Any
    """Tree as made by `layouts.pack`."""
    bare: bool
    """True if the state has no objects and no spread tensors: restoring it is writing its tensors and values."""


class KnownDict(NamedTuple):
    """A dict of plain tensors, as a walk left it."""

    keys: list[str]
    first: int
    """Index of the first of its tensors."""
    paths: list[Path]
    packed: msgspec.Raw


def flatten(state: State, known: dict[Path, KnownDict] | None = None) -> Flat:
    """Split a state; nothing is copied.

    Args:
        state: the state.
        known: the dicts that the last walk found, by path; replaced by those of this walk. A dict whose
            keys are the same objects is not packed again.

    Raises:
        ConfigurationError: an item cannot be kept; the message names its path.
    """
    tensors: list[torch.Tensor] = []
    paths: list[Path] = []
    spread: dict[int, Spread] = {}
    before, found = known or {}, dict[Path, KnownDict]()
    objects: list[Path] = []

    def leaf(value: Any, path: Path) -> Any:
        if isinstance(value, Spread):
            spread[len(tensors)] = value
            value = local_part(value, path)
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            paths.append(path)
            return layouts.pack_ref(len(tensors) - 1)
        if hasattr(value, "state_dict"):
            objects.append(path)
            return value.state_dict()
        return value

    def whole(value: dict[Any, Any], path: Path) -> msgspec.Raw | None:
        """Pack a dict of plain tensors in one go, since modules may have very many; else return None."""
        if not value or not _PLAIN.issuperset(set(map(type, value.values()))):
            return None
        item = _known_dict(before.get(path), value, len(tensors)) or _pack_dict(
            value, path, len(tensors)
        )
        if item is None:
            return None
        tensors.extend(value.values())
        paths.extend(item.paths)
        found[path] = item
        return item.packed

    packed = layouts.pack(state, (), leaf, whole)
    if known is not None:
        known.clear()
        known.update(found)
    return Flat(tensors, paths, spread, packed, bare=not (objects or spread))


def _known_dict(
    known: KnownDict | None, value: dict[Any, torch.Tensor], first: int
) -> KnownDict | None:
    """Return a dict of the last walk if it has the keys of ``value``."""
    if known is None or (known.first, len(known.keys)) != (first, len(value)):
        return None
    return known if all(map(operator.is_, value, known.keys)) else None


def _pack_dict(value: dict[Any, torch.Tensor], path: Path, first: int) -> KnownDict | None:
    if set(map(type, value)) != {str}:
        return None
    refs = map(layouts.pack_ref, range(first, first + len(value)))
    packed = layouts.encode(dict(zip(value, refs, strict=True)), path)
    return KnownDict(list(value), first, [(*path, key) for key in value], msgspec.Raw(packed))


def local_part(value: Spread, path: Path = ()) -> torch.Tensor:
    """Return the live tensor of this rank.

    Raises:
        ConfigurationError: this rank has several parts.
    """
    if isinstance(value, Shard):
        return value.tensor
    if isinstance(value, DTensor):
        with torch.no_grad():
            return value.to_local()
    shards = value.local_shards()
    if len(shards) > 1:
        raise ConfigurationError(f"The tensor {name(path)} has {len(shards)} shards on this rank.")
    if not shards:
        return torch.empty(_nothing_of(tuple(value.size())), dtype=value.dtype, device="cpu")
    return shards[0].tensor


def extent(value: torch.Tensor | Spread, path: Path = ()) -> Extent:
    """Return which part of the whole tensor this rank has.

    Raises:
        ConfigurationError: the part cannot be determined, or is not one box.
    """
    if isinstance(value, Shard):
        return Extent(value.whole, value.at, tuple(value.tensor.shape))
    if isinstance(value, DTensor):
        return _extent_of_dtensor(value, path)
    if isinstance(value, ShardedTensor):
        whole = tuple(value.size())
        shards = value.local_shards()
        if not shards:
            nothing = _nothing_of(whole)
            return Extent(whole, (whole[0], *[0] * len(nothing[1:])), nothing)
        found = shards[0].metadata
        return Extent(whole, tuple(found.shard_offsets), tuple(found.shard_sizes))
    shape = tuple(value.shape)
    return Extent(shape, (0,) * len(shape), shape)


def _nothing_of(whole: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *whole[1:])


def _extent_of_dtensor(value: DTensor, path: Path) -> Extent:
    # The program has imported them.
    from torch.distributed.tensor import Replicate, Shard as Placement  # noqa: PLC0415
    from torch.distributed.tensor._utils import (  # noqa: PLC0415
        compute_local_shape_and_global_offset,
    )

    whole, mesh = tuple(value.shape), value.device_mesh
    if any(placement.is_partial() for placement in value.placements):
        raise ConfigurationError(f"The tensor {name(path)} is a partial sum on each rank.")
    if mesh.get_coordinate() is None:
        raise ConfigurationError(f"This rank has no part of the tensor {name(path)}.")
    with torch.device("cpu"):  # by default, it may calculate on an accelerator
        shape, at = compute_local_shape_and_global_offset(whole, mesh, value.placements)
        if any(not isinstance(p, Placement | Replicate) for p in value.placements):
            _check_contiguous(value, shape, at, path)
    return Extent(whole, tuple(at), tuple(shape))


def _check_contiguous(value: DTensor, shape: Sequence[int], at: Sequence[int], path: Path) -> None:
    """Refuse parts with gaps between their rows, as shards of shards may have."""
    coordinate = value.device_mesh.get_coordinate() or []
    rows = {dim: torch.arange(size) for dim, size in enumerate(value.shape)}
    for mesh_dim, placement in enumerate(value.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            parts, _ = placement._split_tensor(  # noqa: SLF001
                rows[dim], value.device_mesh.size(mesh_dim), with_padding=False, contiguous=True
            )
            rows[dim] = parts[coordinate[mesh_dim]]
    for dim, found in rows.items():
        if not torch.equal(found, torch.arange(at[dim], at[dim] + shape[dim])):
            raise ConfigurationError(
                f"The part of the tensor {name(path)} on this rank is not one block: {value.placements}."
            )


def _owner(value: Spread) -> int:
    if isinstance(value, Shard):
        return value.owner
    if isinstance(value, ShardedTensor):
        return -1
    coordinate = [
        0 if placement.is_replicate() else position
        for placement, position in zip(
            value.placements, value.device_mesh.get_coordinate() or [], strict=True
        )
    ]
    return int(value.device_mesh.mesh[tuple(coordinate)])


def placing(value: Spread) -> object:
    """Return a key that is equal for values with the same part on every rank."""
    if isinstance(value, DTensor):
        return value.device_mesh, value.placements, value.shape
    if isinstance(value, Shard):
        return value.whole, value.at, value.owner
    return value.metadata()


def specs(flat: Flat) -> list[TensorSpec]:
    """Return the description of each tensor.

    Raises:
        ConfigurationError: a tensor is of a kind that cannot be kept.
    """
    if not are_usual(flat.tensors):
        for tensor, path in zip(flat.tensors, flat.paths, strict=True):
            problem = _problem(tensor)
            if problem:
                raise ConfigurationError(
                    f"The tensor {name(path)} {problem}, which is not supported."
                )
    parts = {index: _part(flat, index) for index in flat.spread}
    dtypes = map(DTYPE_NAMES.__getitem__, map(operator.attrgetter("dtype"), flat.tensors))
    shapes = map(tuple, map(operator.attrgetter("shape"), flat.tensors))
    of_each = map(parts.get, range(len(flat.tensors)))
    return list(map(TensorSpec, flat.paths, dtypes, shapes, of_each))


def _part(flat: Flat, index: int) -> TensorPart:
    tensor, path, value = flat.tensors[index], flat.paths[index], flat.spread[index]
    box = extent(value, path)
    if box.shape != tuple(tensor.shape) or not box.fits():
        raise ConfigurationError(
            f"The part of the tensor {name(path)} on this rank has shape {list(tensor.shape)};"
            f" it should be {list(box.shape)} at {list(box.at)} of {list(box.whole)}."
        )
    return TensorPart(box.whole, box.at, _owner(value))


def are_usual(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all of many tensors are of a kind that can be kept."""
    return (
        _PLAIN.issuperset(set(map(type, tensors)))
        and {torch.strided}.issuperset(map(operator.attrgetter("layout"), tensors))
        and DTYPE_NAMES.keys() >= set(map(operator.attrgetter("dtype"), tensors))
        and not any(map(operator.attrgetter("is_meta"), tensors))
        and not any(map(operator.attrgetter("is_nested"), tensors))
    )


def _problem(tensor: torch.Tensor) -> str:
    if type(tensor) not in _PLAIN:
        return f"is a {type(tensor).__name__}"
    if tensor.is_nested:
        return "is nested"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}"
    if tensor.is_meta:
        return "is on the meta device"
    if tensor.dtype not in DTYPE_NAMES:
        return f"has the type {tensor.dtype}"
    return ""


def same_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return for each tensor the index of the first one that is the same view of the same memory."""
    addresses = list(filter(None, map(torch.Tensor.data_ptr, tensors)))
    if len(set(addresses)) == len(addresses):
        return list(range(len(tensors)))
    first: dict[object, int] = {}
    same = []
    for index, tensor in enumerate(tensors):
        key: object = index
        if tensor.numel():
            view = (tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, view)
        same.append(first.setdefault(key, index))
    return same


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters in the order of their numbers in the optimizer's state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def expected_bytes(state: State) -> int:
    """Return the bytes that optimizers without state will add: for Adam, two tensors per parameter."""
    total = 0
    for value in state.values():
        if isinstance(value, torch.optim.Optimizer) and not value.state:
            per_group = [
                sum(parameter.nbytes for parameter in group["params"]) * _copies(group)
                for group in value.param_groups
            ]
            total += sum(per_group)
    return total


def _copies(group: dict[str, Any]) -> int:
    if "betas" in group:
        return 3 if group.get("amsgrad") else 2
    return 1 if group.get("momentum") else 0
