"""Optimizers that set whole rows of a parameter to zero: group lasso (Yue et al. 2021, arXiv:2107.14432, algorithm 1).

They keep z, the sum of all that gradients and regularization contribute, and compute the parameters from it. With Q the
denominator of the optimizer and u the step that it would divide by Q::

    z = z + u - (Q[t] - Q[t-1]) x           Q[0] = 0
    s = sgn(z) max(|z| - lr l1, 0)
    x = -s max(1 - sqrt(d) lr l21 / |s|, 0) / (Q + 2 lr l2)         by row, of d elements

Without regularization that is the optimizer itself. A row whose gradients are small for long is exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlrover.errors import ConfigurationError
from dlrover.optim.dense import DenseOptimizer, by_rows, check_betas, check_ranges
from dlrover.optim.tensors import local, spread_by_rows


class LassoRule(NamedTuple):
    """The optimizer that group lasso is added to."""

    own: Callable[[dict[str, Any]], dict[str, float]]
    """Return the names of its own states, with the number that each begins with."""
    advance: Callable[[int, Tensor, dict[str, Tensor], dict[str, Any]], Tensor]
    """Update these states from the step's number and a gradient; return u."""
    divisor: Callable[[int, dict[str, Tensor], dict[str, Any]], Tensor]
    """Return Q after a step."""


class GroupLasso:
    """The algorithm of `GroupAdam` and `GroupAdagrad`.

    A group is a row of the first dimension, such as that of an embedding or an output of a linear layer; of a vector
    it is an element. Parameters may be spread over ranks in any way (``DTensor``).
    """

    eager = False

    def __init__(self, rule: LassoRule) -> None:
        self._rule = rule

    def begin(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return z of zero, and the states of the rule."""
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        linear = torch.zeros_like(parameter, dtype=dtype).detach()
        own = self._rule.own(group).items()
        return {"linear": linear, **{key: torch.full_like(linear, value) for key, value in own}}

    def update(
        self, step: int, members: dict[int, tuple[Tensor, dict[str, Tensor]]], group: dict[str, Any]
    ) -> None:
        """Update parameters row by row."""
        rule, keys = self._rule, list(self._rule.own(group))
        for parameter, state in members.values():
            whole = [parameter.detach(), parameter.grad, state["linear"], *(state[k] for k in keys)]
            if spread_by_rows(parameter):
                parts = by_rows([local(each) for each in whole])
            else:  # the norm of a row is a sum over ranks, which DTensor takes
                parts = iter([tuple(whole)])
            for value, gradient, linear, *own in parts:
                old, given = value.to(linear.dtype), gradient.to(linear.dtype)
                states = dict(zip(keys, own, strict=True))
                before = rule.divisor(step - 1, states, group) if step > 1 else 0.0
                change = rule.advance(step, given, states, group)
                divisor = rule.divisor(step, states, group)
                linear.add_(change).sub_((divisor - before) * old)
                value.copy_(_solution(linear, divisor, group))


def _adam_own(group: dict[str, Any]) -> dict[str, float]:
    return {"exp_avg": 0.0, "exp_avg_sq": 0.0}


def _adam_advance(
    step: int, gradient: Tensor, states: dict[str, Tensor], group: dict[str, Any]
) -> Tensor:
    beta1, beta2 = group["betas"]
    mean = states["exp_avg"].lerp_(gradient, 1 - beta1)
    states["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return mean * (float(group["lr"]) * math.sqrt(1 - beta2**step) / (1 - beta1**step))


def _adam_divisor(step: int, states: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    eps = group["eps"] * math.sqrt(1 - group["betas"][1] ** step)
    return states["exp_avg_sq"].sqrt().add_(eps)


_ADAM = LassoRule(_adam_own, _adam_advance, _adam_divisor)


class GroupAdam(DenseOptimizer):
    """Adam with group lasso. With ``l1 = l2 = l21 = 0`` it is Adam.

    Nothing else may change the parameters between steps, as `DiLoCo` would.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: learning rate.
        betas: decay rates of the means of gradients and of their squares.
        eps: term of the denominator.
        l1: weight of the magnitudes of elements.
        l2: weight of their squares.
        l21: weight of the norms of rows, times the root of their length.

    Raises:
        ConfigurationError: an argument is out of its range.
    """

    computes_parameters = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        l1: float = 0.0,
        l2: float = 0.0,
        l21: float = 0.0,
    ) -> None:
        check_ranges(lr=lr, eps=eps, l1=l1, l2=l2, l21=l21)
        check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "l1": l1, "l2": l2, "l21": l21}
        super().__init__(params, defaults, GroupLasso(_ADAM))


def _adagrad_own(group: dict[str, Any]) -> dict[str, float]:
    return {"sum": group["initial_accumulator_value"]}


def _adagrad_advance(
    step: int, gradient: Tensor, states: dict[str, Tensor], group: dict[str, Any]
) -> Tensor:
    states["sum"].addcmul_(gradient, gradient)
    return gradient * float(group["lr"])


def _adagrad_divisor(step: int, states: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    return states["sum"].sqrt().add_(group["eps"])


_ADAGRAD = LassoRule(_adagrad_own, _adagrad_advance, _adagrad_divisor)


class GroupAdagrad(DenseOptimizer):
    """Adagrad with group lasso. With ``l1 = l2 = l21 = 0`` it is Adagrad; ``eps=0`` makes it Group FTRL.

    Nothing else may change the parameters between steps, as `DiLoCo` would.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: learning rate.
        initial_accumulator_value: sum of squares before the first step.
        eps: term of the denominator.
        l1: see `GroupAdam`.
        l2: likewise.
        l21: likewise.

    Raises:
        ConfigurationError: an argument is out of its range.
    """

    computes_parameters = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        initial_accumulator_value: float = 0.1,
        eps: float = 1e-10,
        *,
        l1: float = 0.0,
        l2: float = 0.0,
        l21: float = 0.0,
    ) -> None:
        check_ranges(lr=lr, eps=eps, l1=l1, l2=l2, l21=l21)
        if not initial_accumulator_value > 0:
            raise ConfigurationError(
                f"initial_accumulator_value is {initial_accumulator_value}; it must be more than 0."
            )
        defaults = {"lr": lr, "initial_accumulator_value": initial_accumulator_value, "eps": eps}
        defaults |= {"l1": l1, "l2": l2, "l21": l21}
        super().__init__(params, defaults, GroupLasso(_ADAGRAD))


def _solution(linear: Tensor, divisor: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the parameters that z and Q determine."""
    lr = float(group["lr"])
    shrunk = linear.sign().mul_((linear.abs() - lr * group["l1"]).clamp_min_(0))
    if group["l21"]:
        rest = tuple(range(1, linear.dim()))
        norm = torch.linalg.vector_norm(shrunk, dim=rest, keepdim=True) if rest else shrunk.abs()
        limit = math.sqrt(math.prod(linear.shape[1:])) * lr * group["l21"]
        smallest = torch.finfo(norm.dtype).tiny
        shrunk.mul_((norm - limit).clamp_min_(0) / norm.clamp_min(smallest))
    return shrunk.neg_().div_(divisor.add_(2 * lr * group["l2"]))
