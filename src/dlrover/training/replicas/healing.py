"""Healing: a rank that joins gets the state of one that trains, from memory to memory.

The state goes as its values (MessagePack, nothing executable) and the bytes of its tensors, in the collectives of the
new group.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import torch

from dlrover.checkpoint.engine import tree
from dlrover.checkpoint.machine import layout as layouts
from dlrover.training.replicas.groups import MembershipGroup

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
        self.seconds = 0.0
        """Duration of the last healing on this rank."""

    def heal(self, group: MembershipGroup, source: int, joining: list[int], rank: int) -> None:
        """Send the state of ``source`` to the ranks ``joining``; all ranks of the group call this."""
        began = time.monotonic()
        if rank == source:
            self._send(group, source)
        else:
            taken = _receive(group, source)
            if rank in joining:
                self._load(taken)
        self.seconds = time.monotonic() - began

    def _send(self, group: MembershipGroup, source: int) -> None:
        flat = tree.flatten({name: part.state_dict() for name, part in self._parts.items()})
        shapes = [(tree.DTYPE_NAMES[t.dtype], tuple(t.shape)) for t in flat.tensors]
        header = msgspec.msgpack.encode(_Header(layouts.encode(flat.packed), shapes))
        group.send_all([torch.tensor([len(header)])], source)
        group.send_all([torch.frombuffer(bytearray(header), dtype=torch.uint8)], source)
        for tensor in flat.tensors:
            with torch.no_grad():
                group.send_all(_chunks(tensor.detach().cpu().contiguous()), source)

    def _load(self, state: dict[str, Any]) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


def _receive(group: MembershipGroup, source: int) -> dict[str, Any]:
    length = torch.zeros(1, dtype=torch.int64)
    group.send_all([length], source)
    encoded = torch.empty(int(length), dtype=torch.uint8)
    group.send_all([encoded], source)
    header = msgspec.msgpack.decode(encoded.numpy().tobytes(), type=_Header)
    tensors = []
    for dtype, shape in header.tensors:
        tensor = torch.empty(shape, dtype=tree.DTYPES[dtype])
        group.send_all(_chunks(tensor), source)
        tensors.append(tensor)
    found: dict[str, Any] = layouts.replace_refs(
        layouts.decode(header.skeleton), lambda ref, _path: tensors[ref.index]
    )
    return found


def _chunks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return views of a contiguous tensor's bytes."""
    data = tensor.reshape(-1).view(torch.uint8)
    return list(data.split(CHUNK)) if data.numel() else []
