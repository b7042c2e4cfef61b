"""Restoration of a state that has exactly the tensors of a save: its tensors are overwritten in one call.

Most loads are of this kind. `restore` handles all others, tensor by tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from dlrover._util import decoding
from dlrover.checkpoint.engine.buffers import overwrite, written
from dlrover.checkpoint.engine.copying import Copier, LoadTargets
from dlrover.checkpoint.engine.tree import State
from dlrover.checkpoint.loading.restore import MemoryFiller, is_live
from dlrover.checkpoint.machine import layout as layouts
from dlrover.checkpoint.machine.extent import Extent
from dlrover.checkpoint.machine.layout import PackedLayout

_index = decoding.msgpack_decoder(tuple[msgspec.Raw, bytes, int])
"""Decodes a `Layout` without its entries."""
_items = decoding.msgpack_decoder(dict[str | int, msgspec.Raw])

Change = tuple[dict[Any, Any], Any, Any]
"""A dict of the state, a key of it, and the saved value."""


class Replay:
    """The restoration of a state with the saved tensors.

    Args:
        targets: the state's tensors.
        changes: the plain values that differ from the saved ones.
    """

    needs_ranks = False
    as_saved = True

    def __init__(self, targets: LoadTargets, changes: Sequence[Change]) -> None:
        self.targets = targets
        self._changes = changes

    @property
    def wanted(self) -> list[Extent | None]:
        """The needed part of each tensor: all of it."""
        return [entry.extent for entry in self.targets.entries]

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite the tensors and set the plain values."""
        mine = self.targets
        rest = np.ones(len(mine.entries), np.bool_)
        if isinstance(tensors, MemoryFiller):
            tensors.fill_memory(mine.pointers[mine.direct], np.flatnonzero(mine.direct))
            written(itertools.compress(mine.tensors, mine.direct))
            rest = ~mine.direct
            tensors.check(np.flatnonzero(rest))
        pairs = [(mine.tensors[i], tensors[i]) for i in np.flatnonzero(rest) if mine.places[1][i]]
        if pairs:
            overwrite(*map(list, zip(*pairs, strict=True)))
        for container, key, value in self._changes:
            container[key] = value


class Replayer:
    """Planner of replays for one state."""

    def __init__(self, state: State, copier: Copier) -> None:
        self._state, self._copier = state, copier
        self.layout: PackedLayout | None = None
        """The state's layout, which a replay leaves as it is; None if no replay was planned."""

    def plan(self, index: bytes) -> Replay | None:
        """Return the replay of a saved ``index`` if the state has exactly its tensors; else None.

        Exactly: equal bytes, hence the same paths, types, shapes and places, in the same order.

        Raises:
            ConfigurationError: the state holds something that cannot be kept.
        """
        packed = self._copier.layout_of(self._state)
        targets = self._copier.targets
        if targets is None:
            return None
        entries, skeleton, _ = _index.decode(packed.encoded)
        try:
            saved_entries, saved_skeleton, _ = _index.decode(index)
            if bytes(entries) != bytes(saved_entries):
                return None
            changes = _changes(self._state, skeleton, saved_skeleton)
        except msgspec.DecodeError:
            return None  # `restore` reports it
        if changes is None:
            return None
        self.layout = packed
        return Replay(targets, changes)


def _changes(value: dict[Any, Any], mine: bytes, saved: bytes) -> list[Change] | None:
    """Return the plain values below a dict to set; None if its tree differs in more than those."""
    if mine == saved:
        return []
    own, its = _items.decode(mine), _items.decode(saved)
    if own.keys() != its.keys():
        return None
    found: list[Change] = []
    for key, raw in its.items():
        before, after, item = bytes(own[key]), bytes(raw), value[key]
        if before == after:
            continue
        if not is_live(item):
            found.append((value, key, layouts.decode(after)))
            continue
        inner = _changes(item, before, after) if isinstance(item, dict) else None
        if inner is None:
            return None
        found += inner
    return found
