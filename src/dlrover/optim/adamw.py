"""AdamW (Loshchilov and Hutter 2019) with states of 8 bits, or with random rounding of bfloat16 parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dlrover._native.updates import adamw_scalars
from dlrover.optim.dense import DenseOptimizer, check_betas, check_ranges
from dlrover.optim.moments import MomentRule, Moments


def _scalars(step: int, group: dict[str, Any]) -> Any:
    options = group["betas"], group["eps"], group["weight_decay"]
    return adamw_scalars(step, float(group["lr"]), *options)


def _plain(
    step: int, group: dict[str, Any], lists: list[list[Tensor]], largest: list[Tensor]
) -> None:
    parameters, gradients, means, squares = lists
    beta1, beta2 = group["betas"]
    lr = float(group["lr"])
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
    divisor = torch._foreach_sqrt(squares)  # noqa: SLF001
    torch._foreach_mul_(divisor, 1 / math.sqrt(1 - beta2**step))
    torch._foreach_add_(divisor, group["eps"])
    torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
    torch._foreach_addcdiv_(parameters, means, divisor, -lr / (1 - beta1**step))


_RULE = MomentRule("adamw", _scalars, _plain)


class AdamW(DenseOptimizer):
    """``torch.optim.AdamW`` in the forms of `Moments`.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: learning rate.
        betas: decay rates of the means of gradients and of their squares.
        eps: term of the denominator.
        weight_decay: decoupled weight decay.
        state_bits: 32, or 8 for states of a quarter of the size.

    Raises:
        ConfigurationError: an argument is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        state_bits: int = 32,
    ) -> None:
        check_ranges(lr=lr, eps=eps, weight_decay=weight_decay)
        check_betas(betas)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, Moments(_RULE, state_bits))


class AdamW8bit(AdamW):
    """`AdamW` with ``state_bits=8``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, state_bits=8)
