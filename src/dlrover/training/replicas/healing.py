"""Healing: a rank that joins gets the state of one that trains, from memory to memory.

The state goes as its values (MessagePack, nothing executable), then as the bytes of its tensors, in collectives of the
new group that bring them only to the ranks that join.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from dlrover._util import decoding
from dlrover.checkpoint.engine import tree
from dlrover.checkpoint.machine import layout as layouts
from dlrover.errors import ConfigurationError, InfrastructureError
from dlrover.training.replicas.groups import Peers

_PART = "dlrover.part of"
_NUMBERS = "dlrover.numbers of"
CHUNK = 64 * 1024 * 1024
"""Bytes of a state that are sent in one collective."""


class _Header(msgspec.Struct, array_like=True):
    """What a receiver must know of a state before its tensors."""

    skeleton: bytes
    tensors: list[tuple[str, tuple[int, ...]]]


class Healer:
    """Sends and takes the state of objects with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self._parts = parts
        self.mesh: Any = None
        """Device mesh over which the state's ``DTensor``s are spread; None: there are none."""

    def heal(self, group: Peers, source: int, joining: list[int], rank: int) -> None:
        """Send the state of ``source`` to the ranks ``joining``; all ranks of the group call this."""
        if rank == source:
            self._send(group, source, joining)
        else:
            taken = _receive(group, source, joining, takes=rank in joining)
            if taken is not None:
                self._load(taken)

    def _send(self, group: Peers, source: int, joining: list[int]) -> None:
        flat = self._flat()
        shapes = [(tree.DTYPE_NAMES[t.dtype], tuple(t.shape)) for t in flat.tensors]
        header = msgspec.msgpack.encode(_Header(layouts.encode(flat.packed), shapes))
        sizes = [len(header), sum(tensor.nbytes for tensor in flat.tensors)]
        group.send_all([torch.tensor(sizes, device="cpu")], source)
        group.give(torch.frombuffer(bytearray(header), dtype=torch.uint8), source, joining)
        for pieces in _chunks(map(_plain, flat.tensors)):
            group.give(torch.cat(pieces), source, joining)

    def _flat(self) -> tree.Flat:
        try:
            return tree.flatten({name: _divided(p.state_dict()) for name, p in self._parts.items()})
        except Exception as error:  # of the program's objects, too: it is none without the loss
            raise InfrastructureError(
                f"--survive: a rank that returns cannot take the state of the others ({error}); all ranks start again."
            ) from error

    def _load(self, state: dict[str, Any]) -> None:
        if state.keys() != self._parts.keys():
            raise InfrastructureError(
                f"--survive: this rank's program has {', '.join(self._parts)}, and that of the others {', '.join(state)}, so it"
                " cannot take their state; all ranks start again."
            )
        for name, part in self._parts.items():
            taken = _joined(state[name], self.mesh)
            part.load_state_dict(taken)
            if isinstance(part, torch.optim.Optimizer):
                _keep_types(part, taken)


def _keep_types(optimizer: torch.optim.Optimizer, taken: dict[str, Any]) -> None:
    """Give an optimizer's tensors the types that they had: ``load_state_dict`` gives them those of their parameters."""
    for number, parameter in enumerate(tree.parameters_of(optimizer)):
        own, sent = optimizer.state.get(parameter), taken.get("state", {}).get(number)
        if not (isinstance(own, dict) and isinstance(sent, dict)):
            continue
        for key in own.keys() & sent.keys():
            both = own[key], sent[key]
            if (
                all(isinstance(one, torch.Tensor) for one in both)
                and both[0].dtype != both[1].dtype
            ):
                own[key] = both[1].to(device=both[0].device)


def _divided(state: Any) -> Any:
    """Return a state with this rank's part in the place of each ``DTensor``, and what it is a part of.

    Numbers and arrays of NumPy are sent as tensors.
    """
    numpy = sys.modules.get("numpy")

    def part(value: Any) -> Any:
        if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
            with contextlib.suppress(TypeError):  # of a type that torch does not know
                numbers = torch.from_numpy(numpy.array(value))
                return {_NUMBERS: isinstance(value, numpy.generic), "local": numbers}
        if not isinstance(value, tree.DTensor):
            return value
        from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - slow to import

        at = [p.dim if isinstance(p, Shard) else -1 for p in value.placements]
        if not all(isinstance(p, Shard | Replicate) for p in value.placements):
            raise ConfigurationError("--survive: a state has sums that are not complete.")
        return {_PART: [at, list(value.shape), list(value.stride())], "local": value.to_local()}

    return pytree.tree_map(part, state)


def _joined(state: Any, mesh: Any) -> Any:
    """Return the state that `_divided` was made of, on this rank's mesh."""
    if isinstance(state, dict) and _PART in state:
        from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: PLC0415 - slow to import

        at, shape, stride = state[_PART]
        mesh = mesh if len(at) == mesh.ndim else mesh[mesh.mesh_dim_names[-1]]
        placements = [Replicate() if dim < 0 else Shard(dim) for dim in at]
        return DTensor.from_local(
            state["local"], mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )  # fmt: skip
    if isinstance(state, dict) and _NUMBERS in state:
        return state["local"].numpy()[() if state[_NUMBERS] else ...]
    if isinstance(state, dict):
        return {key: _joined(value, mesh) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_joined(value, mesh) for value in state)
    return state


def _receive(
    group: Peers, source: int, joining: list[int], *, takes: bool
) -> dict[str, Any] | None:
    """Return the state of ``source``; None without ``takes``: the rank only takes part in the collectives."""
    sizes = torch.zeros(2, dtype=torch.int64, device="cpu")
    group.send_all([sizes], source)
    header_size, size = sizes.tolist()
    none = torch.empty(0, dtype=torch.uint8, device="cpu")
    if not takes:
        for _call in range(1 - (-size // CHUNK)):
            group.give(none, source, joining)
        return None
    encoded = torch.empty(header_size, dtype=torch.uint8, device="cpu")
    group.give(encoded, source, joining)
    header = decoding.msgpack(encoded.numpy().tobytes(), _Header)
    tensors = [
        torch.empty(shape, dtype=tree.DTYPES[dtype], device="cpu")
        for dtype, shape in header.tensors
    ]
    for pieces in _chunks(tensors):
        lengths = [piece.numel() for piece in pieces]
        chunk = torch.empty(sum(lengths), dtype=torch.uint8, device="cpu")
        group.give(chunk, source, joining)
        for piece, part in zip(pieces, chunk.split(lengths), strict=True):
            piece.copy_(part)
    found: dict[str, Any] = layouts.replace_refs(
        layouts.decode(header.skeleton), lambda ref, _path: tensors[ref.index]
    )
    return found


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as contiguous memory of the host."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield views of contiguous tensors' bytes, in order, which together have `CHUNK` bytes; the last may have fewer."""
    pieces: list[torch.Tensor] = []
    room = CHUNK
    for tensor in tensors:
        rest = tensor.reshape(-1).view(torch.uint8)
        while rest.numel():
            pieces.append(rest[:room])
            rest, room = rest[room:], room - pieces[-1].numel()
            if not room:
                yield pieces
                pieces, room = [], CHUNK
    if pieces:
        yield pieces
