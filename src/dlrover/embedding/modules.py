"""PyTorch modules whose rows are in a table that grows: `HashEmbedding`, `HashEmbeddingBag`."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from dlrover.embedding import gradients
from dlrover.embedding.gradients import EmbeddingTable, HeldGradients
from dlrover.errors import ConfigurationError

Mode = Literal["sum", "mean", "max"]
Bag: TypeAlias = "Tensor | tuple[Tensor, Tensor]"
Batch = TypeVar("Batch")
Keys = TypeVar("Keys", Tensor, "NDArray[np.int64]")


AHEAD = 2
"""Batches whose rows are fetched ahead at most; an older one that was not used is dropped."""


class _Fetched(NamedTuple):
    """Rows of the distinct keys of a batch."""

    keys: Tensor
    """Distinct keys, ``(n,)``."""
    inverse: Tensor
    """Place of each given key in them, in the shape of the given keys."""
    rows: Tensor
    """``(n, dim)``."""


class _Ahead(NamedTuple):
    """A batch whose rows are fetched ahead."""

    given: object
    insert: bool
    """Whether new keys get rows."""
    found: Future[_Fetched]


class _Rows(nn.Module):  # type: ignore[misc]
    """Rows of a table as a leaf of the gradient's graph, whose gradient updates the table."""

    def __init__(self, table: EmbeddingTable) -> None:
        super().__init__()
        if not hasattr(table, "lookup"):
            raise ConfigurationError(
                f"table is {table!r}; a HashTable, or what open_table returns, is accepted."
            )
        self.table = table
        self.gradient_scale: float | None = None
        """Factor of the gradients; None: 1 / the number of ranks, as DistributedDataParallel has it."""
        self.held: HeldGradients | None = None
        """Gradients that wait for an `EmbeddingOptimizer`; None: each backward pass applies its own at its end."""
        self._ahead: dict[int, _Ahead] = {}
        self._pool: ThreadPoolExecutor | None = None

    def extra_repr(self) -> str:
        """Return the dimension, for the module's representation."""
        return f"dim={self.table.dim}"

    def _distinct(self, given: object, keys: Tensor) -> _Fetched:
        """Look rows up, or take those that were fetched ahead for what was given."""
        ahead = self._ahead.pop(id(given), None)
        if ahead is not None and ahead.given is given and ahead.insert == self.training:
            found = ahead.found.result()
        else:
            found = self._fetch(keys, insert=self.training)
        if self.training and torch.is_grad_enabled():
            found.rows.requires_grad_()
            hold = functools.partial(self._hold, found.keys)  # without the rows, whose hook it is
            found.rows.register_hook(hold)
        return found

    def _fetch(self, keys: Tensor, *, insert: bool) -> _Fetched:
        _check(keys)
        distinct, inverse = torch.unique(keys, return_inverse=True)
        read = self.table.lookup if insert else self.table.peek
        rows = torch.from_numpy(read(distinct.cpu().numpy())).to(keys.device)
        return _Fetched(distinct, inverse, rows)

    def _hold(self, keys: Tensor, gradient: Tensor) -> None:
        held = self.held if self.held is not None else gradients.of_this_pass()
        scale = self.gradient_scale
        if scale is None:
            distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
            scale = 1 / torch.distributed.get_world_size() if distributed else 1.0
        held.add(self.table, keys, gradient, scale)

    def _fetch_ahead(self, given: object, keys: Tensor) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "embedding-prefetch")
        while len(self._ahead) >= AHEAD:
            del self._ahead[next(iter(self._ahead))]
        fetched = self._pool.submit(self._fetch, keys, insert=self.training)
        self._ahead[id(given)] = _Ahead(given, self.training, fetched)


class HashEmbedding(_Rows):
    """Embedding of any int64 keys; a key's row is made when it is first looked up in training.

    The table's own optimizer updates the rows at the end of the backward pass, once for each key that the pass has
    gradients of, so they are no parameters of the model: neither the model's optimizer nor DistributedDataParallel
    handles them. Several ranks need a table on servers.

    Args:
        table: A `HashTable`, or a table on servers.
    """

    def forward(self, keys: Tensor) -> Tensor:
        """Return rows of keys: ``(*keys.shape, dim)``."""
        found = self._distinct(keys, keys)
        return functional.embedding(found.inverse, found.rows)

    def prefetch(self, keys: Tensor) -> None:
        """Begin to fetch rows for the next `forward`, which must get this very tensor.

        They are as of now: an update that happens meanwhile is not in them.
        """
        self._fetch_ahead(keys, keys)


class HashEmbeddingBag(_Rows):
    """Sums, means or maxima of rows for bags of keys, of several features in one request.

    Equal keys of different features have different rows: the table has them under the keys that `table_keys` returns.

    Args:
        table: A `HashTable`, or a table on servers.
        features: Names of the features.
        mode: ``sum``, ``mean`` or ``max``; an empty bag gives zeros.
    """

    def __init__(
        self, table: EmbeddingTable, features: Sequence[str] = (), *, mode: Mode = "sum"
    ) -> None:
        super().__init__(table)
        if mode not in ("sum", "mean", "max"):
            raise ConfigurationError(f"mode is {mode!r}; 'sum', 'mean' or 'max' is accepted.")
        if isinstance(features, str):
            raise ConfigurationError(f"features is {features!r}; a list of names is accepted.")
        if len(set(features)) != len(features):
            raise ConfigurationError(f"features has a name twice: {', '.join(features)}.")
        self.features, self.mode = tuple(features), mode
        self._salts = {name: _salt(name) for name in features}

    def extra_repr(self) -> str:
        """Return dimension, features and mode, for the module's representation."""
        return f"dim={self.table.dim}, features={self.features}, mode={self.mode!r}"

    def forward(
        self, bags: Bag | Mapping[str, Bag], weights: Tensor | Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return one row for each bag: ``(bags, dim)``, or ``(bags, features * dim)`` with several features.

        Args:
            bags: Keys ``(bags, length)``, or a pair of keys ``(n,)`` and the offset of each bag ``(bags,)``; with
                features, such a value for each of them.
            weights: Weights of the keys in the shape of the keys, for mode ``sum``.
        """
        parts = self._parts(bags)
        factors = {} if weights is None else self._factors(bags, weights)
        found = self._distinct(bags, self._keys(parts))
        outputs, first = [], 0
        for name, (flat, offsets) in parts.items():
            places = found.inverse[first : first + len(flat)]
            first += len(flat)
            outputs.append(
                functional.embedding_bag(
                    places,
                    found.rows,
                    offsets,
                    mode=self.mode,
                    per_sample_weights=factors.get(name),
                )
            )
        return torch.cat(outputs, 1) if self.features else outputs[0]

    def prefetch(self, bags: Bag | Mapping[str, Bag]) -> None:
        """Begin to fetch rows for the next `forward`, which must get this very object, unchanged.

        They are as of now: an update that happens meanwhile is not in them.
        """
        self._fetch_ahead(bags, self._keys(self._parts(bags)))

    def table_keys(self, feature: str, keys: Keys) -> Keys:
        """Return keys of a feature, int64, as the table has them: for `HashTable.peek`, exported files and lookups elsewhere."""
        if feature not in self._salts:
            raise ConfigurationError(
                f"feature is {feature!r}; accepted are {', '.join(self.features)}."
            )
        return keys ^ self._salts[feature]

    def _parts(self, bags: Bag | Mapping[str, Bag]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the keys ``(n,)`` and the offset of each bag, by feature."""
        if not self.features:
            if isinstance(bags, Mapping):
                raise ConfigurationError(
                    "bags is a mapping, and this HashEmbeddingBag has no features."
                )
            return {"": _flat(bags)}
        parts = {name: _flat(bag) for name, bag in self._of_features("bags", bags).items()}
        counts = {name: len(offsets) for name, (_, offsets) in parts.items()}
        if len(set(counts.values())) > 1:
            raise ConfigurationError(
                f"bags has {', '.join(f'{count} of {name}' for name, count in counts.items())};"
                " the same number for each feature is accepted."
            )
        return parts

    def _of_features(self, what: str, given: Any) -> dict[str, Any]:
        """Return the value of each feature, in the order of the features."""
        names = sorted(given) if isinstance(given, Mapping) else [type(given).__name__]
        if not isinstance(given, Mapping) or names != sorted(self.features):
            raise ConfigurationError(
                f"{what} has {', '.join(names)}; the features {', '.join(self.features)} are expected."
            )
        return {name: given[name] for name in self.features}

    def _factors(self, bags: Any, weights: Any) -> dict[str, Tensor]:
        """Return the weights of the keys ``(n,)``, by feature."""
        if self.mode != "sum":
            raise ConfigurationError(f"mode is {self.mode!r}; weights are accepted with 'sum'.")
        bags = bags if self.features else {"": bags}
        given = self._of_features("weights", weights) if self.features else {"": weights}
        for name, factors in given.items():
            keys = bags[name] if isinstance(bags[name], Tensor) else bags[name][0]
            if factors.shape != keys.shape:
                raise ConfigurationError(
                    f"weights{' of ' * bool(name)}{name} have shape {tuple(factors.shape)}; that of the keys,"
                    f" {tuple(keys.shape)}, is accepted."
                )
        return {name: factors.reshape(-1) for name, factors in given.items()}

    def _keys(self, parts: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        return torch.cat([keys ^ self._salts.get(name, 0) for name, (keys, _) in parts.items()])


class EmbeddingOptimizer:
    """Applies the gradients of embeddings in `step`, instead of each backward pass: for accumulated gradients.

    Args:
        module: Module with `HashEmbedding` and `HashEmbeddingBag` modules.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = [each for each in module.modules() if isinstance(each, _Rows)]
        if not self._modules:
            raise ConfigurationError(f"{type(module).__name__} has no HashEmbedding.")
        self._held = HeldGradients()
        self.zero_grad()

    def step(self) -> None:
        """Apply the sum of the gradients since the last step to each table, once for each key."""
        self._held.apply()

    def zero_grad(self) -> None:
        """Drop the gradients since the last step."""
        self._held = HeldGradients()
        for each in self._modules:
            each.held = self._held


def prefetched(
    loader: Iterable[Batch],
    module: HashEmbedding | HashEmbeddingBag,
    keys: Callable[[Batch], Any],
) -> Iterator[Batch]:
    """Yield the batches of a loader; the rows of the next one are fetched while the caller uses one.

    ``keys`` returns the very tensor of a batch, or for a `HashEmbeddingBag` the very bags, that the caller gives to
    ``module``.
    """
    last: list[Batch] = []
    for batch in loader:
        module.prefetch(keys(batch))
        if last:
            yield last.pop()
        last.append(batch)
    yield from last


def _salt(feature: str) -> int:
    """Return a number by which the keys of a feature differ from those of others."""
    data = feature.encode()
    return (zlib.crc32(data) << 31) ^ zlib.crc32(data[::-1] + b"feature")


def _check(keys: Any) -> None:
    if not isinstance(keys, Tensor):
        raise ConfigurationError(
            f"keys are of type {type(keys).__name__}; an int64 tensor is accepted: text_keys returns the keys of texts."
        )
    if keys.dtype != torch.int64:
        raise ConfigurationError(f"keys have type {keys.dtype}; int64 is accepted.")


def _flat(bag: Any) -> tuple[Tensor, Tensor]:
    """Return the keys ``(n,)`` and the offset of each bag."""
    if isinstance(bag, tuple | list) and [isinstance(part, Tensor) for part in bag] == [True, True]:
        if isinstance(bag, list):  # two bags may look like keys and offsets
            raise ConfigurationError(
                "bags are a list of 2 tensors; keys of shape (bags, length) or a tuple of keys and offsets are accepted:"
                " make a tuple of the list that a DataLoader with pin_memory makes of one."
            )
        keys, offsets = bag
        _check(keys)
        if offsets.dtype not in (torch.int32, torch.int64):
            raise ConfigurationError(
                f"offsets have type {offsets.dtype}; int64 or int32 is accepted."
            )
        return keys, offsets
    _check(bag)
    if bag.dim() != 2:
        raise ConfigurationError(
            f"keys of bags have {bag.dim()} dimensions; 2 are accepted, or keys and offsets."
        )
    count, length = bag.shape
    return bag.reshape(-1), torch.arange(count, device=bag.device) * length
