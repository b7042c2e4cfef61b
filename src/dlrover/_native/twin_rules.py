"""Twins of the optimizers in ``native/rules.h``: the same float32 operations in the same order.

A rule gets rows: values ``(n, dim)``, states ``(n, states, dim)``, gradients ``(n, dim)``, and how many updates each
row has had with this one ``(n,)``. It changes values and states in place, and returns which rows the penalties set to
zero ``(n,)``, or None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from dlrover._native.tables import Hyper

F = np.float32


def _power(base: float, exponents: Any) -> Any:
    """Return powers by repeated squaring, ``(n, 1)``."""
    result, factor = np.ones(len(exponents), F), F(base)
    left = exponents.astype(np.int64)
    while left.any():
        result = np.where(left & 1, result * factor, result)
        factor = F(factor * factor)
        left >>= 1
    return result[:, None]


def _corrections(h: Hyper, t: Any) -> tuple[Any, Any]:
    return 1 - _power(h.beta1, t), 1 - _power(h.beta2, t)


def _mean(mean: Any, beta: Any, g: Any) -> None:
    mean[:] = beta * mean + (1 - beta) * g


def _total(squares: Any) -> Any:
    """Return sums of rows, added from the first element to the last, ``(n, 1)``."""
    return np.cumsum(squares, axis=1, dtype=F)[:, -1:]


def sgd(h: Hyper, values: Any, _states: Any, g: Any, _t: Any) -> None:
    """Stochastic gradient descent with L2 regularization."""
    values -= F(h.rate) * (g + F(h.decay) * values)


def momentum(h: Hyper, values: Any, states: Any, g: Any, _t: Any) -> None:
    """Heavy ball."""
    speed = states[:, 0]
    speed[:] = F(h.beta1) * speed + g
    values -= F(h.rate) * speed


def adagrad(h: Hyper, values: Any, states: Any, g: Any, _t: Any) -> None:
    """Duchi et al., 2011."""
    square = states[:, 0]
    square += g * g
    values -= F(h.rate) * (g / (np.sqrt(square) + F(h.epsilon)))


def adadelta(h: Hyper, values: Any, states: Any, g: Any, _t: Any) -> None:
    """Zeiler, 2012."""
    square, change, epsilon = states[:, 0], states[:, 1], F(h.epsilon)
    _mean(square, F(h.beta2), g * g)
    delta = np.sqrt(change + epsilon) / np.sqrt(square + epsilon) * g
    _mean(change, F(h.beta2), delta * delta)
    values -= F(h.rate) * delta


def adam(h: Hyper, values: Any, states: Any, g: Any, t: Any) -> None:
    """Adam (Kingma and Ba, 2015) with decoupled weight decay."""
    first, second = _corrections(h, t)
    mean, square = states[:, 0], states[:, 1]
    _mean(mean, F(h.beta1), g)
    _mean(square, F(h.beta2), g * g)
    direction = (mean / first) / (np.sqrt(square / second) + F(h.epsilon))
    values[:] = values * (1 - F(h.rate) * F(h.decay)) - F(h.rate) * direction


def amsgrad(h: Hyper, values: Any, states: Any, g: Any, t: Any) -> None:
    """AMSGrad (Reddi et al., 2018)."""
    first, second = _corrections(h, t)
    mean, square, most = states[:, 0], states[:, 1], states[:, 2]
    _mean(mean, F(h.beta1), g)
    _mean(square, F(h.beta2), g * g)
    most[:] = np.where(most > square, most, square)
    values -= F(h.rate) * ((mean / first) / (np.sqrt(most / second) + F(h.epsilon)))


def radam(h: Hyper, values: Any, states: Any, g: Any, t: Any) -> None:
    """RAdam (Liu et al., 2020): without the second moment until its variance is tractable."""
    power2 = _power(h.beta2, t)
    first, second = 1 - _power(h.beta1, t), 1 - power2
    limit = F(2) / (1 - F(h.beta2)) - 1
    length = limit - 2 * t[:, None].astype(F) * power2 / second
    rectified = length > 5
    over, under = (length - 4) * (length - 2) * limit, (limit - 4) * (limit - 2) * length
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = np.where(rectified, np.sqrt(over / under), F(1))
    mean, square = states[:, 0], states[:, 1]
    _mean(mean, F(h.beta1), g)
    _mean(square, F(h.beta2), g * g)
    divisor = np.where(rectified, np.sqrt(square / second) + F(h.epsilon), F(1))
    values -= F(h.rate) * factor * ((mean / first) / divisor)


def adabelief(h: Hyper, values: Any, states: Any, g: Any, t: Any) -> None:
    """AdaBelief (Zhuang et al., 2020)."""
    first, second = _corrections(h, t)
    mean, spread, beta2 = states[:, 0], states[:, 1], F(h.beta2)
    _mean(mean, F(h.beta1), g)
    off = g - mean
    spread[:] = beta2 * spread + (1 - beta2) * (off * off) + F(h.epsilon)
    values -= F(h.rate) * ((mean / first) / (np.sqrt(spread / second) + F(h.epsilon)))


def lamb(h: Hyper, values: Any, states: Any, g: Any, t: Any) -> None:
    """LAMB (You et al., 2020), with each row as a layer."""
    first, second = _corrections(h, t)
    mean, square = states[:, 0], states[:, 1]
    _mean(mean, F(h.beta1), g)
    _mean(square, F(h.beta2), g * g)
    direction = (mean / first) / (np.sqrt(square / second) + F(h.epsilon)) + F(h.decay) * values
    size, length = _total(values * values), _total(direction * direction)
    with np.errstate(invalid="ignore", divide="ignore"):
        trust = np.where((size > 0) & (length > 0), np.sqrt(size) / np.sqrt(length), F(1))
    values -= F(h.rate) * trust * direction


def agd(h: Hyper, values: Any, states: Any, g: Any, t: Any) -> None:
    """AGD (Yue et al., 2023)."""
    first, second = _corrections(h, t)
    before = np.where(t[:, None] > 1, 1 - _power(h.beta1, t - 1), F(1))
    mean, square = states[:, 0], states[:, 1]
    last = mean.copy()
    _mean(mean, F(h.beta1), g)
    change = mean / first - last / before
    _mean(square, F(h.beta2), change * change)
    root = np.sqrt(square / second)
    divisor = np.where(root > F(h.epsilon), root, F(h.epsilon))
    values[:] = values * (1 - F(h.rate) * F(h.decay)) - F(h.rate) * ((mean / first) / divisor)


def _shrunk(linear: Any, l1: Any) -> Any:
    over = np.abs(linear) - l1
    over = np.where(over > 0, over, F(0))
    return np.where(linear < 0, -over, over)


def _remains(norm: Any, l21: Any, dim: int) -> Any:
    if l21 == 0:
        return np.ones_like(norm)
    length, penalty = np.sqrt(norm), np.sqrt(F(dim)) * l21
    with np.errstate(divide="ignore"):
        return np.where(length > penalty, 1 - penalty / length, F(0))


def ftrl(h: Hyper, values: Any, states: Any, g: Any, _t: Any) -> Any:
    """FTRL-Proximal (McMahan et al., 2013), with the group's norm (arXiv 2107.14432)."""
    linear, square, rate = states[:, 0], states[:, 1], F(h.rate)
    before = np.sqrt(square)
    square += g * g
    linear[:] = linear + g - (np.sqrt(square) - before) / rate * values
    rest = _shrunk(linear, F(h.l1))
    kept = _remains(_total(rest * rest), F(h.l21), values.shape[1])
    divisor = (F(h.beta1) + np.sqrt(square)) / rate + 2 * F(h.l2)
    values[:] = -(rest * kept) / divisor
    return kept[:, 0] == 0


def group_adam(h: Hyper, values: Any, states: Any, g: Any, t: Any) -> Any:
    """Group Adam (arXiv 2107.14432, algorithm 1). Without penalties it is Adam."""
    first, second = 1 - _power(h.beta1, t), np.sqrt(1 - _power(h.beta2, t))
    later = t[:, None] > 1
    last = np.where(later, np.sqrt(1 - _power(h.beta2, t - 1)), F(1))
    mean, square, linear, rate = states[:, 0], states[:, 1], states[:, 2], F(h.rate)
    before = np.where(later, np.sqrt(square) / last + F(h.epsilon), F(0))
    _mean(mean, F(h.beta1), g)
    _mean(square, F(h.beta2), g * g)
    after = np.sqrt(square) / second + F(h.epsilon)
    linear[:] = linear + rate * (mean / first) - (after - before) * values
    rest = _shrunk(linear, rate * F(h.l1))
    kept = _remains(_total(rest * rest), rate * F(h.l21), values.shape[1])
    values[:] = -(rest * kept) / (after + 2 * rate * F(h.l2))
    return kept[:, 0] == 0


RULES: dict[str, Callable[[Hyper, Any, Any, Any, Any], Any]] = {
    rule.__name__: rule
    for rule in (
        sgd, momentum, adagrad, adadelta, adam, amsgrad, radam, adabelief, lamb, agd, ftrl, group_adam,
    )
}  # fmt: skip
