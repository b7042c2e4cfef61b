"""From what a user calls state to tensors and a skeleton, and back in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlrover.checkpoint import layout as layouts
from dlrover.checkpoint.layout import ITEM_BYTES, Path, TensorRef, name
from dlrover.errors import ConfigurationError

State = dict[str, Any]
"""Modules, optimizers, anything with ``state_dict``, tensors and plain values, nested as you like."""

DTYPES = {key: getattr(torch, key) for key in ITEM_BYTES if hasattr(torch, key)}
_NAMES = {dtype: key for key, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Flat:
    """A state taken apart. The tensors are the live ones."""

    tensors: list[torch.Tensor]
    paths: list[Path]
    packed: Any
    """The tree as `layouts.pack` makes it."""


def flatten(state: State) -> Flat:
    """Take a state apart; nothing is copied.

    Raises:
        ConfigurationError: something in it cannot be kept; the message names its path.
    """
    tensors: list[torch.Tensor] = []
    paths: list[Path] = []

    def leaf(value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            paths.append(path)
            return layouts.pack_ref(len(tensors) - 1)
        if hasattr(value, "state_dict"):
            return value.state_dict()
        return value

    packed = layouts.pack(state, (), leaf)
    return Flat(tensors, paths, packed)


def specs(flat: Flat) -> list[tuple[Path, str, tuple[int, ...]]]:
    """Path, type and shape of each tensor.

    Raises:
        ConfigurationError: a tensor is of a kind that cannot be kept.
    """
    found = []
    for tensor, path in zip(flat.tensors, flat.paths, strict=True):
        problem = _problem(tensor)
        if problem:
            raise ConfigurationError(f"The tensor {name(path)} {problem}, which is not supported.")
        found.append((path, _NAMES[tensor.dtype], tuple(tensor.shape)))
    return found


def _problem(tensor: torch.Tensor) -> str:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(tensor).__name__}"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}"
    if tensor.is_meta:
        return "is on the meta device"
    if tensor.dtype not in _NAMES:
        return f"has the type {tensor.dtype}"
    return ""


def same_tensors(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the index of the first one that is the same memory seen in the same way."""
    first: dict[object, int] = {}
    same = []
    for index, tensor in enumerate(tensors):
        key: object = index
        if tensor.numel():
            view = (tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, view)
        same.append(first.setdefault(key, index))
    return same


def expected_bytes(state: State) -> int:
    """Bytes that optimizers without state yet will add to it: two tensors per parameter for Adam's kin."""
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


# ---- back


def restore(state: State, tree: Any, tensors: Sequence[torch.Tensor]) -> None:
    """Put a saved tree into ``state``, in place.

    ``tensors`` may be views of memory that changes later: what is kept of them is copied.

    Raises:
        ConfigurationError: the saved state has other keys, types or shapes; the message names them.
    """
    if not isinstance(tree, dict):
        raise ConfigurationError("The checkpoint does not hold a dict.")
    restorer = _Restorer(tensors)
    _check_keys(state, tree, ())
    restorer.check(state, tree, ())
    with torch.no_grad():
        for key, value in state.items():
            state[key] = restorer.restored(value, tree[key], (key,))


class _Restorer:
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors

    def check(self, value: Any, saved: Any, path: Path) -> None:
        """Compare before anything is changed, as far as the live state tells."""
        if isinstance(value, torch.Tensor):
            self._check_tensor(value, saved, path)
        elif not hasattr(value, "load_state_dict") and _is_live(value):
            _check_container(value, saved, path)
            for key, item in _items(value):
                self.check(item, saved[key], (*path, key))

    def _check_tensor(self, value: torch.Tensor, saved: Any, path: Path) -> None:
        if not isinstance(saved, TensorRef):
            raise ConfigurationError(f"{name(path)} is a tensor, but not in the checkpoint.")
        found = self._tensors[saved.index]
        if (found.shape, found.dtype) != (value.shape, value.dtype):
            raise ConfigurationError(
                f"The tensor {name(path)} has shape {list(value.shape)} and type {value.dtype};"
                f" in the checkpoint {list(found.shape)} and {found.dtype}."
            )

    def restored(self, value: Any, saved: Any, path: Path) -> Any:
        """What is to stand where ``value`` stands."""
        if isinstance(value, torch.Tensor):
            value.copy_(self._tensors[saved.index])
            return value
        if hasattr(value, "load_state_dict"):
            self._load(value, saved)
            return value
        if not _is_live(value):
            return self._filled(saved, copy=True)
        if isinstance(value, tuple):
            return tuple(
                self.restored(item, saved[index], (*path, index))
                for index, item in enumerate(value)
            )
        for key, item in _items(value):
            value[key] = self.restored(item, saved[key], (*path, key))
        return value

    def _load(self, value: Any, saved: Any) -> None:
        """Hand an object its state.

        A module copies what it gets. An optimizer keeps it: it gets its own tensors, with the saved
        content, or copies. What others do is not known: they get copies.
        """
        if isinstance(value, torch.nn.Module):
            value.load_state_dict(self._filled(saved, copy=False))
        elif isinstance(value, torch.optim.Optimizer):
            value.load_state_dict(self._reused(value.state_dict(), saved))
        else:
            value.load_state_dict(self._filled(saved, copy=True))

    def _filled(self, saved: Any, *, copy: bool) -> Any:
        """The saved tree with its tensors."""
        if isinstance(saved, TensorRef):
            tensor = self._tensors[saved.index]
            return tensor.clone() if copy else tensor
        if isinstance(saved, dict):
            return {key: self._filled(item, copy=copy) for key, item in saved.items()}
        if isinstance(saved, list):
            return [self._filled(item, copy=copy) for item in saved]
        if isinstance(saved, tuple):
            return tuple(self._filled(item, copy=copy) for item in saved)
        return saved

    def _reused(self, live: Any, saved: Any) -> Any:
        """The saved tree, with the live tree's tensors where they fit."""
        if isinstance(saved, TensorRef):
            found = self._tensors[saved.index]
            if not isinstance(live, torch.Tensor) or (live.shape, live.dtype) != (
                found.shape,
                found.dtype,
            ):
                return found.clone()
            return live.copy_(found)
        if isinstance(saved, dict):
            inner = live if isinstance(live, dict) else {}
            return {key: self._reused(inner.get(key), item) for key, item in saved.items()}
        return self._filled(saved, copy=True)


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value))


def _is_live(value: Any) -> bool:
    """Whether there is something in it that is restored in place, not replaced as a whole."""
    if isinstance(value, torch.Tensor) or hasattr(value, "load_state_dict"):
        return True
    if isinstance(value, dict | list | tuple):
        return any(_is_live(item) for _, item in _items(value))
    return False


def _check_container(value: Any, saved: Any, path: Path) -> None:
    if isinstance(value, dict) and isinstance(saved, dict):
        _check_keys(value, saved, path)
    elif type(value) is not type(saved) or len(value) != len(saved):
        raise ConfigurationError(
            f"{name(path)} is a {type(value).__name__} of {len(value)} elements, but not in the checkpoint."
        )


def _check_keys(value: dict[Any, Any], saved: dict[Any, Any], path: Path) -> None:
    where = f" in {name(path)}" if path else ""
    unknown = [str(key) for key in saved if key not in value]
    if unknown:
        raise ConfigurationError(
            f"The checkpoint has keys{where} that the state has not: {', '.join(unknown)}."
        )
    missing = [str(key) for key in value if key not in saved]
    if missing:
        raise ConfigurationError(
            f"The state has keys{where} that the checkpoint has not: {', '.join(missing)}."
        )
