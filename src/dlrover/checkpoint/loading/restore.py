"""Restoration of a saved tree into a state, in place.

The state to restore decides which part of each tensor is needed: a tensor that was saved as four shards
can be restored as two, or whole.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from dlrover.checkpoint.engine import tree as trees
from dlrover.checkpoint.engine.buffers import Words, check_memory, overwrite, written
from dlrover.checkpoint.engine.tree import (
    DTYPES,
    DTensor,
    Shard,
    ShardedTensor,
    Spread,
    State,
    parameters_of,
)
from dlrover.checkpoint.machine.extent import Extent
from dlrover.checkpoint.machine.layout import Path, TensorRef, TensorSpec, name, replace_refs
from dlrover.errors import ConfigurationError

_PLAIN = (torch.Tensor, torch.nn.Parameter)

Prepare = Callable[[Any, Sequence[TensorSpec], bool], "Restoration | StateReading"]
"""Prepares the restoration of a saved tree and its tensors; True: another number of ranks saved them."""


@runtime_checkable
class MemoryFiller(Protocol):
    """Saved tensors that can be copied directly to addresses."""

    def fill_memory(self, pointers: Words, indices: npt.NDArray[np.intp]) -> None:
        """Copy saved tensors, given by number, to addresses of plain memory."""

    def check(self, indices: npt.NDArray[np.intp]) -> None:
        """Check saved tensors, given by number, while the caller copies them."""


@runtime_checkable
class Filler(Protocol):
    """Saved tensors that can be read directly to their targets."""

    def fill(self, pending: list[tuple[torch.Tensor, int]]) -> list[tuple[torch.Tensor, int]]:
        """Overwrite tensors with saved ones, given by number; return the pairs that the caller must copy."""


def in_place(state: State, local: Collection[str]) -> Prepare:
    """Return how to restore ``state``; the keys in ``local`` only if the number of ranks is unchanged."""

    def prepare(tree: Any, specs: Sequence[TensorSpec], moved: bool) -> Restoration:
        return Restoration(state, tree, specs, except_for=local if moved else ())

    return prepare


class Restoration:
    """The plan of one restoration, and its execution.

    Args:
        state: the state to restore.
        tree: the saved tree, with a `TensorRef` for each tensor.
        specs: the descriptions of these tensors, by index.
        except_for: keys of ``state`` that stay unchanged.

    Raises:
        ConfigurationError: the saved state has other keys, types or shapes; the message names them.
    """

    def __init__(
        self,
        state: State,
        tree: Any,
        specs: Sequence[TensorSpec],
        except_for: Collection[str] = (),
    ) -> None:
        if not isinstance(tree, dict):
            raise ConfigurationError("The checkpoint does not hold a dict.")
        self._state, self._specs = state, specs
        self._tree = {key: item for key, item in tree.items() if key not in except_for}
        self._live: dict[int, Any] = {}
        """State of optimizers, and of objects with spread tensors, by object id."""
        self._modules: list[tuple[torch.nn.Module, Any]] = []
        """Modules of the state, each with its saved tree."""
        self._models: dict[int, Any] = {}
        """The live tensors that saved ones overwrite or imitate, by index."""
        self._tensors: Sequence[torch.Tensor] = ()
        self.needs_ranks = False
        """True if a part of the state is restored from the saved trees of all ranks."""
        self._ranks: Sequence[Any] = ()
        restored = {key: item for key, item in state.items() if key not in except_for}
        _check_keys(restored, self._tree, ())
        self._match(restored, self._tree, ())
        self._pending: list[tuple[torch.Tensor, int]] = []
        """Tensors to overwrite, each with the index of its saved tensor."""

    # ---- plan

    def know(self, trees: Sequence[Any]) -> None:
        """Store the saved trees of all ranks, by rank."""
        self._ranks = trees

    @property
    def as_saved(self) -> bool:
        """True if the needed parts are exactly the saved ones."""
        spread = {i for i, model in self._models.items() if isinstance(model, Spread | _Like)}
        parts = {i for i, spec in enumerate(self._specs) if spec.part is not None}
        return all(
            self._wanted(index) == self._specs[index].extent
            for index in spread | parts
            if index in self._used
        )

    @functools.cached_property
    def wanted(self) -> list[Extent | None]:
        """The needed part of each tensor; None if it is not needed at all."""
        return [
            self._wanted(index) if index in self._used else None
            for index in range(len(self._specs))
        ]

    @functools.cached_property
    def _used(self) -> set[int]:
        return {ref.index for ref in _refs(self._tree)}

    @functools.cached_property
    def varying(self) -> set[int]:
        """Buffers that may differ between ranks: numbers such as running means, but no quantised weights."""
        return {
            ref.index
            for module, saved in self._modules
            for key in saved.keys()
            - {key for key, _ in module.named_parameters(remove_duplicate=False)}
            for ref in _refs(saved[key])
            if DTYPES[self._specs[ref.index].dtype].is_floating_point
        }

    def _match(self, value: Any, saved: Any, path: Path) -> None:
        """Compare live and saved state before any change, as far as the live state allows."""
        if isinstance(value, torch.Tensor | Spread):
            self._check_tensor(value, saved, path)
            self._models[saved.index] = value
        elif hasattr(value, "load_rank_states"):
            self.needs_ranks = True
        elif hasattr(value, "load_state_dict"):
            self._find_models(value, saved)
        elif is_live(value):
            _check_container(value, saved, path)
            for key, item in _items(value):
                self._match(item, saved[key], (*path, key))

    def _check_tensor(self, value: Any, saved: Any, path: Path) -> None:
        if not isinstance(saved, TensorRef):
            raise ConfigurationError(f"{name(path)} is a tensor, but not in the checkpoint.")
        spec = self._specs[saved.index]
        if type(value) in _PLAIN and spec.part is None:
            known = spec.shape, DTYPES[spec.dtype]
            if known == (value.shape, value.dtype):
                return
        whole, saved_whole = trees.extent(value, path).whole, spec.extent.whole
        dtype = trees.local_part(value, path).dtype if isinstance(value, Spread) else value.dtype
        if (saved_whole, DTYPES[spec.dtype]) != (whole, dtype):
            raise ConfigurationError(
                f"The tensor {name(path)} has shape {list(whole)} and type {dtype};"
                f" in the checkpoint {list(saved_whole)} and {DTYPES[spec.dtype]}."
            )

    def _find_models(self, value: Any, saved: Any) -> None:
        """Note how an object's tensors are spread now, if that can matter."""
        is_module = isinstance(value, torch.nn.Module)
        is_optimizer = isinstance(value, torch.optim.Optimizer)
        if is_module and isinstance(saved, dict):
            self._modules.append((value, saved))
        spread = any(self._specs[ref.index].part is not None for ref in _refs(saved))
        if is_module and not spread:
            spread = any(isinstance(item, DTensor) for item in value.parameters())
        elif is_optimizer and not spread:
            spread = any(isinstance(item, DTensor) for item in parameters_of(value))
        if spread or is_optimizer:
            live = self._live[id(value)] = value.state_dict()
            if spread:
                self._pair(live, saved)
        if spread and is_optimizer and isinstance(saved, dict):
            self._pair_with_parameters(value, saved)

    def _pair(self, live: Any, saved: Any) -> None:
        if isinstance(saved, TensorRef):
            if isinstance(live, torch.Tensor | Spread):
                self._models[saved.index] = live
        elif isinstance(live, dict) and isinstance(saved, dict):
            for key in saved.keys() & live.keys():
                self._pair(live[key], saved[key])
        elif isinstance(live, list | tuple) and isinstance(saved, list | tuple):
            for mine, its in zip(live, saved, strict=False):
                self._pair(mine, its)

    def _pair_with_parameters(
        self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]
    ) -> None:
        """Plan to spread state that the optimizer does not have yet like its parameters."""
        for number, parameter in enumerate(parameters_of(optimizer)):
            for item in _items(saved.get("state", {}).get(number, {})):
                ref = item[1]
                if isinstance(ref, TensorRef) and ref.index not in self._models:
                    spec = self._specs[ref.index]
                    if spec.extent.whole == tuple(parameter.shape):
                        self._models[ref.index] = _Like(parameter)

    def _wanted(self, index: int) -> Extent:
        spec = self._specs[index]
        saved = spec.extent
        model = self._models.get(index)
        if model is None:
            if spec.part is not None:
                raise ConfigurationError(
                    f"{name(spec.path)} is a part of a tensor; nothing in the state tells which part of it"
                    " is needed now."
                )
            return saved
        wanted = trees.extent(model.tensor if isinstance(model, _Like) else model, spec.path)
        return wanted if wanted.whole == saved.whole else saved

    # ---- execute

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        """Restore the state.

        ``tensors`` are the wanted parts. They may be views of memory that changes later, so anything kept is
        copied.
        """
        self._tensors = tensors
        with torch.no_grad():
            for key, saved in self._tree.items():
                self._state[key] = self._restored(self._state[key], saved, (key,))
            self._overwrite()

    def _restored(self, value: Any, saved: Any, path: Path) -> Any:
        """Return the restored replacement for ``value``."""
        if isinstance(value, torch.Tensor | Spread):
            return self._overwritten(value, saved.index)
        if hasattr(value, "load_rank_states"):
            value.load_rank_states([_at(tree, path) for tree in self._ranks])
            return value
        if hasattr(value, "load_state_dict"):
            self._load(value, saved)
            return value
        if not is_live(value):
            return self._filled(saved, copy=True)
        if isinstance(value, tuple):
            return tuple(
                self._restored(item, saved[key], (*path, key)) for key, item in _items(value)
            )
        for key, item in _items(value):
            value[key] = self._restored(item, saved[key], (*path, key))
        return value

    def _overwritten(self, value: Any, index: int) -> Any:
        """Schedule a live tensor to be overwritten with the saved content, and return it."""
        target = trees.local_part(value) if isinstance(value, Spread) else value
        if isinstance(value, DTensor):
            written([value])  # what follows is written to its part
        if target.numel():
            check_memory(target, self._specs[index].path)
            self._pending.append((target, index))
        return value

    def _overwrite(self) -> None:
        """Overwrite all scheduled tensors in one call, because there may be very many."""
        pending, self._pending = self._pending, []
        _overwrite(pending, self._tensors)

    def _load(self, value: Any, saved: Any) -> None:
        """Pass an object its saved state.

        A module copies the tensors that it gets. An optimizer keeps them, so it gets its own tensors with the
        saved content, or copies. Other objects get copies, because they may do either.
        """
        if isinstance(value, torch.nn.Module):
            if isinstance(self._tensors, Filler) and not _has_load_hooks(value):
                # New memory costs more than reading.
                state = self._reused(value.state_dict(), saved)
            else:
                state = self._filled(saved, copy=False)
            state = _with_versions(value, state)
        elif isinstance(value, torch.optim.Optimizer):
            state = self._reused(self._live[id(value)], saved)
        else:
            state = self._filled(saved, copy=True)
        self._overwrite()  # the object may read the tensors
        value.load_state_dict(state)

    def _filled(self, saved: Any, *, copy: bool) -> Any:
        """Return the saved tree with its tensors."""

        def content(ref: TensorRef, _: Path) -> Any:
            tensor = self._tensors[ref.index]
            return self._like_model(ref.index, tensor.clone() if copy else tensor)

        return replace_refs(saved, content)

    def _like_model(self, index: int, tensor: torch.Tensor) -> Any:
        """Wrap a part in the type that the state has there now."""
        model = self._models.get(index)
        if isinstance(model, _Like):
            model = model.tensor
        if isinstance(model, DTensor):
            return type(model).from_local(
                tensor, model.device_mesh, model.placements,
                run_check=False, shape=model.shape, stride=model.stride(),
            )  # fmt: skip
        if isinstance(model, Shard):
            return Shard(tensor, model.whole, model.at, model.owner)
        if isinstance(model, ShardedTensor):
            return self._overwritten(model, index)
        return tensor

    def _reused(self, live: Any, saved: Any) -> Any:
        """Return the saved tree, with the live tree's tensors where they fit."""
        if isinstance(saved, TensorRef):
            if isinstance(live, torch.Tensor | Spread):
                mine = trees.local_part(live) if isinstance(live, Spread) else live
                dtype, part = DTYPES[self._specs[saved.index].dtype], self.wanted[saved.index]
                if part is not None and (mine.shape, mine.dtype) == (part.shape, dtype):
                    return self._overwritten(live, saved.index)
            return self._like_model(saved.index, self._tensors[saved.index].clone())
        if isinstance(saved, dict):
            inner = live if isinstance(live, dict) else {}
            return {key: self._reused(inner.get(key), item) for key, item in saved.items()}
        return self._filled(saved, copy=True)


def _overwrite(pending: list[tuple[torch.Tensor, int]], tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite tensors with those of the given numbers."""
    if pending and isinstance(tensors, Filler):
        scheduled = pending
        pending = tensors.fill(scheduled)
        written(target for target, _ in scheduled)
    if pending:
        targets, contents = zip(*((t, tensors[i]) for t, i in pending), strict=True)
        overwrite(targets, contents)


def _with_versions(module: torch.nn.Module, state: dict[str, Any]) -> OrderedDict[str, Any]:
    """Return a module's state with the versions of its parts: a part converts a state that seems to be older."""
    versioned = OrderedDict(state)
    versioned._metadata = {  # type: ignore[attr-defined]  # noqa: SLF001 - where PyTorch keeps them
        name: {"version": part._version}  # noqa: SLF001
        for name, part in module.named_modules(remove_duplicate=False)
    }
    return versioned


def _has_load_hooks(module: torch.nn.Module) -> bool:
    """Return True if hooks may change a state before loading; it must then not use the module's memory."""
    return any(part._load_state_dict_pre_hooks for part in module.modules())  # noqa: SLF001


class StateReading:
    """A saved state read into new tensors; parts of spread ones become `Shard` objects.

    Args:
        tree: the saved tree, with a `TensorRef` for each tensor.
        specs: the descriptions of these tensors, by index.
        keys: the keys of the tree whose tensors are read; all others become zeros that take no memory.
    """

    def __init__(
        self, tree: Any, specs: Sequence[TensorSpec], keys: Collection[str] | None = None
    ) -> None:
        self._tree, self._specs = tree, specs
        self.needs_ranks = False
        self.varying: set[int] = set()
        self.state: State = {}
        self._pending: list[tuple[torch.Tensor, int]] = []
        chosen = tree if keys is None else {k: item for k, item in tree.items() if k in keys}
        used = {ref.index for ref in _refs(chosen)}
        self.as_saved = len(used) == len(specs)
        self.wanted: list[Extent | None] = [
            spec.extent if index in used else None for index, spec in enumerate(specs)
        ]

    def know(self, trees: Sequence[Any]) -> None:
        """Do nothing: the states of other ranks are not needed."""

    def run(self, tensors: Sequence[torch.Tensor]) -> None:
        """Build the state from copies of these tensors, which may be views of memory that changes later."""
        self.state = replace_refs(self._tree, lambda ref, _: self._tensor(ref.index))
        pending, self._pending = self._pending, []
        _overwrite(pending, tensors)

    def _tensor(self, index: int) -> Any:
        spec = self._specs[index]
        if self.wanted[index] is None:
            return torch.zeros((), dtype=DTYPES[spec.dtype], device="cpu").expand(spec.shape)
        part = spec.part
        made = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="cpu")
        if made.numel():
            self._pending.append((made, index))
        return made if part is None else Shard(made, part.whole, part.at, part.owner)


class _Like:
    """Marker for a tensor that shows how another one is spread; it is not overwritten."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _at(tree: Any, path: Path) -> Any:
    """Return the item at a path of a saved tree; None if there is none."""
    try:
        for key in path:
            tree = tree[key]
    except (KeyError, IndexError, TypeError):
        return None
    return tree


def _refs(saved: Any) -> Iterator[TensorRef]:
    if isinstance(saved, TensorRef):
        yield saved
    elif isinstance(saved, dict | list | tuple):
        for _, item in _items(saved):
            yield from _refs(item)


def _items(value: Any) -> list[tuple[Any, Any]]:
    return list(value.items()) if isinstance(value, dict) else list(enumerate(value))


def is_live(value: Any) -> bool:
    """Return True if the value holds something that is restored in place, not replaced as a whole."""
    if isinstance(value, torch.Tensor | Spread):
        return True
    if hasattr(value, "load_state_dict") or hasattr(value, "load_rank_states"):
        return True
    if isinstance(value, dict | list | tuple):
        return any(is_live(item) for _, item in _items(value))
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
