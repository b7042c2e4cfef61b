"""AGD (Yue et al., "AGD: an Auto-switchable Optimizer using Stepwise Gradient Difference", NeurIPS 2023)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dlrover._native.updates import agd_scalars
from dlrover.errors import ConfigurationError
from dlrover.optim.dense import DenseOptimizer, check_betas, check_ranges
from dlrover.optim.moments import MomentRule, Moments


def _scalars(step: int, group: dict[str, Any]) -> Any:
    clip = math.inf if group["clip"] is None else group["clip"]
    return agd_scalars(
        step, float(group["lr"]), group["betas"], group["delta"], group["weight_decay"], clip
    )


def _plain(
    step: int, group: dict[str, Any], lists: list[list[Tensor]], largest: list[Tensor]
) -> None:
    parameters, gradients, means, squares = lists
    beta1, beta2 = group["betas"]
    first, second = 1 - beta1**step, 1 - beta2**step
    lr = float(group["lr"])
    before = 1 / (1 - beta1 ** (step - 1)) if step > 1 else 0.0
    last = torch._foreach_mul(means, before)  # noqa: SLF001
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    change = torch._foreach_mul(means, 1 / first)  # noqa: SLF001
    torch._foreach_sub_(change, last)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, change, change, 1 - beta2)
    if largest:
        torch._foreach_maximum_(largest, squares)
        squares = largest
    quotient = torch._foreach_sqrt(squares)  # noqa: SLF001
    torch._foreach_clamp_min_(quotient, group["delta"] * math.sqrt(second))
    torch._foreach_reciprocal_(quotient)
    torch._foreach_mul_(quotient, means)
    if group["clip"] is not None:
        torch._foreach_clamp_max_(quotient, group["clip"])
        torch._foreach_clamp_min_(quotient, -group["clip"])
    torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
    torch._foreach_add_(parameters, quotient, alpha=-lr * math.sqrt(second) / first)


_RULE = MomentRule("agd", _scalars, _plain)


class AGD(DenseOptimizer):
    """An optimizer whose second moment is that of the changes of the mean gradient.

    ::

        m = b1 m + (1 - b1) g            m̂[t] = m / (1 - b1^t)
        s = m̂[t] - m̂[t-1]                with s = m̂[1] in the first step
        b = b2 b + (1 - b2) s²           b̂ = b / (1 - b2^t)
        p = p (1 - lr wd) - lr m̂ / max(sqrt(b̂), delta)

    Where the root is below ``delta``, the step is that of momentum SGD with the rate ``lr / delta``. Start with about
    a tenth of AdamW's learning rate; for transformers, with ``delta=1e-14``.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: learning rate.
        betas: decay rates of the two means.
        delta: smallest denominator.
        weight_decay: decoupled weight decay.
        amsgrad: True to use the largest b so far.
        clip: limit of the magnitude of ``m / max(sqrt(b), delta sqrt(1 - b2^t))``, the quotient before the
            correction of the biases; 5 helps where a training is unstable.
        state_bits: 32, or 8 for states of a quarter of the size (`Moments`).

    Raises:
        ConfigurationError: an argument is out of its range.
    """

    def __init__(  # noqa: PLR0913 - options, by name
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        delta: float = 1e-5,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
        clip: float | None = None,
        state_bits: int = 32,
    ) -> None:
        check_ranges(lr=lr, weight_decay=weight_decay)
        check_betas(betas)
        if not delta > 0:
            raise ConfigurationError(f"delta is {delta}; it must be more than 0.")
        if clip is not None and not clip > 0:
            raise ConfigurationError(f"clip is {clip}; it must be more than 0, or None.")
        defaults = {
            "lr": lr, "betas": betas, "delta": delta, "weight_decay": weight_decay,
            "amsgrad": amsgrad, "clip": clip,
        }  # fmt: skip
        super().__init__(params, defaults, Moments(_RULE, state_bits, amsgrad=amsgrad))


class AGD8bit(AGD):
    """`AGD` with ``state_bits=8``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, state_bits=8)
