"""The updates of the compiled library in numpy: the same operations in the same order, slower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dlrover._native.library import memory


def adamw(_count: int, *given: Any) -> None:
    """Update tensors."""
    with np.errstate(all="ignore"):
        for tensor, (decay, rest1, beta2, rest2, root, epsilon, step) in _tensors(given):
            value, gradient, (mean, square) = tensor.load()
            mean += (gradient - mean) * rest1
            square[:] = square * beta2 + gradient * gradient * rest2
            value = value * decay - step * (mean / (np.sqrt(square) * root + epsilon))
            tensor.store(value)


def agd(_count: int, *given: Any) -> None:
    """Update tensors."""
    with np.errstate(all="ignore"):
        for tensor, (decay, rest1, beta2, rest2, now, before, floor, clip, step) in _tensors(given):
            value, gradient, (mean, square) = tensor.load()
            last = mean.copy()
            mean += (gradient - last) * rest1
            change = mean * now - last * before
            square[:] = square * beta2 + change * change * rest2
            root = np.sqrt(square)
            direction = mean / np.where(root > floor, root, floor)
            direction = np.where(direction > clip, clip, direction)
            direction = np.where(direction < -clip, -clip, direction)
            value = value * decay - step * direction
            tensor.store(value)


def adagrad(_count: int, *given: Any) -> None:
    """Update tensors."""
    with np.errstate(all="ignore"):
        for tensor, (epsilon, step) in _tensors(given):
            value, gradient, (square,) = tensor.load()
            square += gradient * gradient
            value = value - step * (gradient / (np.sqrt(square) + epsilon))
            tensor.store(value)


def draw(key: Any, index: Any) -> Any:
    """Return 32 random bits for each element (lowbias32 of C. Wellons's hash-prospector)."""
    with np.errstate(over="ignore"):
        value = np.uint32(key) ^ np.asarray(index).astype(np.uint32)
        value = (value ^ value >> np.uint32(16)) * np.uint32(0x7FEB352D)
        value = (value ^ value >> np.uint32(15)) * np.uint32(0x846CA68B)
        return value ^ value >> np.uint32(16)


class _Tensor(NamedTuple):
    parameters: int
    gradients: int
    states: list[int]
    size: int
    half: bool
    key: Any

    def load(self) -> tuple[Any, Any, list[Any]]:
        """Return parameters and gradients as float32, and the states, which can be written."""
        states = [_array(place, self.size, np.float32) for place in self.states]
        return self._load(self.parameters), self._load(self.gradients), states

    def _load(self, address: int) -> Any:
        if not self.half:
            return _array(address, self.size, np.float32)
        words = _array(address, self.size, np.uint16).astype(np.uint32)
        return (words << np.uint32(16)).view(np.float32)

    def store(self, value: Any) -> None:
        """Write the parameters."""
        if not self.half:
            _array(self.parameters, self.size, np.float32)[:] = value
            return
        noise = draw(self.key, np.arange(self.size)) & np.uint32(0xFFFF)
        words = value.view(np.uint32) + np.where(np.isfinite(value), noise, np.uint32(0))
        _array(self.parameters, self.size, np.uint16)[:] = words >> np.uint32(16)


def _tensors(given: Sequence[Any]) -> Iterator[tuple[_Tensor, Any]]:
    """Yield each tensor, and the scalars, from the arguments of the compiled function."""
    *lists, sizes, scalars, seed, half, _threads = given
    key = draw(seed & 0xFFFFFFFF, seed >> 32)
    columns = zip(*(each.tolist() for each in lists), strict=True)
    for index, (places, size) in enumerate(zip(columns, sizes.tolist(), strict=True)):
        first, second, *states = places
        yield _Tensor(first, second, states, size, bool(half), draw(key, index)), scalars


def _array(address: int, size: int, dtype: Any) -> Any:
    """Return the memory at an address as an array that can be written."""
    if not size:
        return np.empty(0, dtype)
    bytes_ = memory(address, size * np.dtype(dtype).itemsize, writable=True)
    return np.frombuffer(bytes_, dtype)
