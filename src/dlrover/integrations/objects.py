"""Conversion of any state dict to one that a checkpoint can hold, and back.

Anything but tensors, plain values and containers of these becomes bytes, through ``torch.save``. Reading
these with ``torch.load(weights_only=False)`` can run any code, and therefore requires ``trusted=True``.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch

from dlrover.checkpoint.engine.checkpointer import Checkpointer, LoadRecord
from dlrover.checkpoint.engine.tree import DTYPES, Spread, State
from dlrover.checkpoint.machine import layout
from dlrover.errors import ConfigurationError

TAG = "__dlrover__"
"""Key of a dict that stands for another object; its value says for which kind."""

_PLAIN = (type(None), bool, int, float, str, bytes)
_DTYPES = frozenset(DTYPES.values())
_KINDS: dict[str, Any] = {"dict": dict, "OrderedDict": OrderedDict, "Size": torch.Size}


class Portable:
    """Wrapper that makes an object's state dict, which may hold anything, fit for a checkpoint.

    Args:
        owner: the object, with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def state_dict(self) -> Any:
        """Return the owner's state, as a checkpoint can hold it."""
        return encode(self._owner.state_dict())

    def load_state_dict(self, state: Any) -> None:
        """Restore the owner's state."""
        self._owner.load_state_dict(decode(state, trusted=True))


def encode(value: Any, path: layout.Path = ()) -> Any:
    """Return an equal tree that a checkpoint can hold; tensors stay the live ones.

    Raises:
        ConfigurationError: a leaf cannot be pickled; the message names its path.
    """
    kind = type(value)
    if kind in _PLAIN or _is_kept(value):
        return value
    if kind is list or kind is tuple:
        return kind([encode(item, (*path, index)) for index, item in enumerate(value)])
    if kind is dict or kind is OrderedDict:
        plain = all(type(key) in (str, int) for key in value) and TAG not in value
        if plain:
            items: Any = {key: encode(item, (*path, key)) for key, item in value.items()}
            return items if kind is dict else {TAG: kind.__name__, "items": items}
        pairs = [(encode(key), encode(item, (*path, str(key)))) for key, item in value.items()]
        return {TAG: kind.__name__, "pairs": pairs}
    if kind is torch.Size:  # frequent in some states
        return {TAG: "Size", "items": list(value)}
    return {TAG: pickled(value, path)}


def _is_kept(value: Any) -> bool:
    """Return whether the value is a tensor that a checkpoint holds directly."""
    if isinstance(value, Spread):
        return True
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_meta
        and value.dtype in _DTYPES
    )


def pickled(value: Any, path: layout.Path) -> bytes:
    """Convert any object to bytes.

    Raises:
        ConfigurationError: it cannot be pickled; the message names its path.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigurationError(
            f"{layout.name(path)} is a {type(value).__qualname__}, which cannot be pickled: {error}."
        ) from error
    return buffer.getvalue()


def unpickled(data: bytes, device: str | None = None, *, trusted: bool) -> Any:
    """Restore the object given to `pickled`; tensors return to their own device, or go to ``device``.

    Raises:
        ConfigurationError: the data holds objects, and is not trusted.
    """
    return load(io.BytesIO(data), "The checkpoint", device, trusted=trusted)


def load(source: Any, where: str, device: Any = None, *, trusted: bool) -> Any:
    """Load what ``torch.save`` has written; other classes than tensors and plain values only if trusted.

    Raises:
        ConfigurationError: the data holds such objects, and is not trusted.
    """
    try:
        return torch.load(source, map_location=device, weights_only=not trusted)
    except pickle.UnpicklingError as error:
        if trusted:
            raise
        raise ConfigurationError(
            f"{where} holds pickled objects, and to read those runs whatever they say; pass trusted=True if"
            " you trust its author."
        ) from error


def decode(value: Any, *, trusted: bool) -> Any:
    """Restore the value given to `encode`.

    Raises:
        ConfigurationError: it holds pickled objects, and is not trusted.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([decode(item, trusted=trusted) for item in value])
    if kind is not dict:
        return value
    if TAG in value:
        return _meant(value, trusted=trusted)
    return {key: decode(item, trusted=trusted) for key, item in value.items()}


def _meant(value: dict[str, Any], *, trusted: bool) -> Any:
    """Restore the object that a dict with a tag stands for."""
    meaning = value[TAG]
    if isinstance(meaning, bytes):
        return unpickled(meaning, trusted=trusted)
    if "pairs" in value:
        pairs = decode([tuple(pair) for pair in value["pairs"]], trusted=trusted)
        return _KINDS[meaning](pairs)
    return _KINDS[meaning](decode(value["items"], trusted=trusted))


def read(
    checkpointer: Checkpointer, keys: Collection[str], *, trusted: bool
) -> tuple[LoadRecord, State] | None:
    """Return the decoded result of `Checkpointer.read`. Collective.

    Raises:
        ConfigurationError: it holds pickled objects, and is not trusted.
    """
    found = checkpointer.read(keys)
    return None if found is None else (found[0], decode(found[1], trusted=trusted))
