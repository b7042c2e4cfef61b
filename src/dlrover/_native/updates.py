"""Updates of optimizers in one pass over parameters, gradients and states, by the compiled library or by its twin.

Tensors are given as lists: numpy arrays of uint64 with the addresses of parameters, gradients and states, and with
the numbers of elements. The caller answers for the addresses, which are multiples of the size of an element, and
keeps the memory alive. States are float32. Parameters and gradients are float32, or with ``half`` bfloat16: then
parameters are rounded to one of their two neighbours at random, so that the mean of many small updates is right
(stochastic rounding). ``seed`` determines the draws and must differ from step to step.

Results do not depend on ``threads``, on the machine's instructions, or on which of the two implementations runs:
each does the same float32 operations in the same order, without fused multiply-add. Only the payload of a NaN may
differ.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dlrover._native import library, twin_updates
from dlrover._native.kernels import checked, taking_arrays


def adamw_scalars(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Any:
    """Return what `Updates.adamw` needs at a step, which counts from 1.

    The update is that of ``torch.optim.AdamW``: ``p = p (1 - lr wd) - lr m̂ / (sqrt(v̂) + eps)``.
    """
    first, second = 1 - betas[0] ** step, 1 - betas[1] ** step
    decay = 1 - lr * weight_decay
    return np.array(
        [decay, 1 - betas[0], betas[1], 1 - betas[1], 1 / math.sqrt(second), eps, lr / first],
        np.float32,
    )


def agd_scalars(
    step: int,
    lr: float,
    betas: tuple[float, float],
    delta: float,
    weight_decay: float,
    clip: float = math.inf,
) -> Any:
    """Return what `Updates.agd` needs at a step, which counts from 1.

    The update is ``p = p (1 - lr wd) - lr m̂ / max(sqrt(b̂), delta)``, where b is the mean of the squares of
    ``m̂[t] - m̂[t-1]`` (Yue et al., AGD: an Auto-switchable Optimizer, NeurIPS 2023). ``clip`` limits the quotient of
    the means before their bias is corrected.
    """
    first, second = 1 - betas[0] ** step, 1 - betas[1] ** step
    last = 1 / (1 - betas[0] ** (step - 1)) if step > 1 else 0.0
    decay, floor, size = 1 - lr * weight_decay, delta * math.sqrt(second), lr * math.sqrt(second)
    return np.array(
        [decay, 1 - betas[0], betas[1], 1 - betas[1], 1 / first, last, floor, clip, size / first],
        np.float32,
    )


def adagrad_scalars(lr: float, eps: float) -> Any:
    """Return what `Updates.adagrad` needs: ``s = s + g²; p = p - lr g / (sqrt(s) + eps)``."""
    return np.array([eps, lr], np.float32)


class Tensors:
    """Tensors to be updated, by their addresses. Arrays of uint64, of one length."""

    def __init__(
        self,
        parameters: Any,
        gradients: Any,
        states: tuple[Any, ...],
        sizes: Any,
        *,
        half: bool = False,
    ) -> None:
        """Check the lists.

        Args:
            parameters: Addresses of float32 elements, or with ``half`` of bfloat16.
            gradients: Likewise.
            states: Addresses of float32 elements: for Adagrad the sums of squares, else means and squares.
            sizes: Numbers of elements.
            half: Whether parameters and gradients are bfloat16.

        Raises:
            ValueError: a list is not what the module describes.
        """
        named = {f"states[{number}]": state for number, state in enumerate(states)}
        self.count = checked(sizes, 1, parameters=parameters, gradients=gradients, **named)
        self.lists = (parameters, gradients, *states, sizes)
        self.half = half


class Updates:
    """Updates parameters and states in place."""

    def __init__(self, loaded: library.Loaded) -> None:
        self._functions = _TWIN if loaded.library is None else _compiled(loaded.library)

    def adamw(self, tensors: Tensors, scalars: Any, *, seed: int = 0, threads: int = 1) -> None:
        """Update tensors with `adamw_scalars`; their states are the means of gradients and of their squares.

        Raises:
            ValueError: here and below, an argument is not what the module describes.
        """
        self._update("adamw", tensors, scalars, seed, threads)

    def agd(self, tensors: Tensors, scalars: Any, *, seed: int = 0, threads: int = 1) -> None:
        """Update tensors with `agd_scalars`; their states are the means of gradients and of the squared changes."""
        self._update("agd", tensors, scalars, seed, threads)

    def adagrad(self, tensors: Tensors, scalars: Any, *, seed: int = 0, threads: int = 1) -> None:
        """Update tensors, or rows of tables, with `adagrad_scalars`; no row may come twice."""
        self._update("adagrad", tensors, scalars, seed, threads)

    def _update(self, name: str, tensors: Tensors, scalars: Any, seed: int, threads: int) -> None:
        lists, number = _FORMS[name]
        if len(tensors.lists) != lists:
            raise ValueError(
                f"{name} takes {lists - 3} states; there are {len(tensors.lists) - 3}."
            )
        fits = isinstance(scalars, np.ndarray) and scalars.dtype == np.float32
        if not fits or scalars.shape != (number,) or not scalars.flags.c_contiguous:
            raise ValueError(f"scalars must be a numpy array of {number} float32.")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is {seed}; accepted are 0 to 2**64 - 1.")
        if threads < 1:
            raise ValueError(f"threads is {threads}; it must be 1 or more.")
        half = int(tensors.half)
        self._functions[name](tensors.count, *tensors.lists, scalars, seed, half, threads)


_FORMS = {"adamw": (5, 7), "agd": (5, 9), "adagrad": (4, 2)}
"""By name: how many lists, the sizes included, and how many scalars."""
_TWIN: dict[str, Callable[..., None]] = {
    "adamw": twin_updates.adamw,
    "agd": twin_updates.agd,
    "adagrad": twin_updates.adagrad,
}


def _compiled(loaded: ctypes.CDLL) -> dict[str, Callable[..., None]]:
    last = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_size_t)
    forms = {
        name: (None, (ctypes.c_size_t, *(ctypes.c_void_p,) * lists, *last))
        for name, (lists, _) in _FORMS.items()
    }
    made = library.functions(loaded, "dlrover_", forms)
    return {name: taking_arrays(function) for name, function in made.items()}


@functools.cache
def updates(choice: str) -> Updates:
    """Return the updates for a value of ``DLROVER_NATIVE``.

    Raises:
        ImportError: see `library.use`.
    """
    return Updates(library.use(choice))
