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
from typing import Any

import torch
from torch import Tensor

from dlrover.errors import ConfigurationError
from dlrover.optim.moments import check_gradient, check_rates


class GroupLasso(torch.optim.Optimizer):  # type: ignore[misc]
    """Base of `GroupAdam` and `GroupAdagrad`.

    A group is a row of the first dimension, such as that of an embedding or an output of a linear layer; of a vector
    it is an element. Parameters may be spread over ranks in any way (``DTensor``).
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        for name in ("l1", "l2", "l21", "eps"):
            if not defaults[name] >= 0:
                raise ConfigurationError(f"{name} is {defaults[name]}; it must be 0 or more.")
        super().__init__(params, defaults)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: function that computes the gradients again and returns the loss.

        Returns:
            What ``closure`` returned.

        Raises:
            ConfigurationError: a gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    check_gradient(self, parameter.grad)
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["linear"] = torch.zeros_like(parameter, dtype=dtype)
            self._begin(state, group)
        state["step"] += 1
        value, gradient = parameter.to(dtype), parameter.grad.to(dtype)
        before = self._divisor(int(state["step"]) - 1, state, group)
        change = self._advance(int(state["step"]), gradient, state, group)
        divisor = self._divisor(int(state["step"]), state, group)
        state["linear"].add_(change).sub_((divisor - before) * value)
        parameter.copy_(_solution(state["linear"], divisor, group))

    def _begin(self, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        """Make the optimizer's own state; ``linear`` has the shape and the type."""
        raise NotImplementedError

    def _advance(
        self, step: int, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        """Update that state; return u."""
        raise NotImplementedError

    def _divisor(self, step: int, state: dict[str, Tensor], group: dict[str, Any]) -> Any:
        """Return Q after a step; 0 before the first."""
        raise NotImplementedError


class GroupAdam(GroupLasso):
    """Adam with group lasso. With ``l1 = l2 = l21 = 0`` it is Adam.

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
        check_rates(lr, betas, 0.0)
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "l1": l1, "l2": l2, "l21": l21}
        )

    def _begin(self, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        state["exp_avg"] = torch.zeros_like(state["linear"])
        state["exp_avg_sq"] = torch.zeros_like(state["linear"])

    def _advance(
        self, step: int, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        beta1, beta2 = group["betas"]
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        return mean * (float(group["lr"]) * math.sqrt(1 - beta2**step) / (1 - beta1**step))

    def _divisor(self, step: int, state: dict[str, Tensor], group: dict[str, Any]) -> Any:
        if step == 0:
            return 0.0
        return state["exp_avg_sq"].sqrt() + group["eps"] * math.sqrt(1 - group["betas"][1] ** step)


class GroupAdagrad(GroupLasso):
    """Adagrad with group lasso. With ``l1 = l2 = l21 = 0`` it is Adagrad; ``eps=0`` makes it Group FTRL.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: learning rate.
        initial_accumulator_value: sum of squares before the first step.
        eps: term of the denominator.
        l1: weight of the magnitudes of elements.
        l2: weight of their squares.
        l21: weight of the norms of rows, times the root of their length.

    Raises:
        ConfigurationError: an argument is out of its range.
    """

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
        check_rates(lr, (0.0, 0.0), 0.0)
        if not initial_accumulator_value > 0:
            raise ConfigurationError(
                f"initial_accumulator_value is {initial_accumulator_value}; it must be more than 0."
            )
        defaults = {"lr": lr, "initial_accumulator_value": initial_accumulator_value, "eps": eps}
        super().__init__(params, {**defaults, "l1": l1, "l2": l2, "l21": l21})

    def _begin(self, state: dict[str, Tensor], group: dict[str, Any]) -> None:
        state["sum"] = torch.full_like(state["linear"], group["initial_accumulator_value"])

    def _advance(
        self, step: int, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        state["sum"].addcmul_(gradient, gradient)
        return gradient * float(group["lr"])

    def _divisor(self, step: int, state: dict[str, Tensor], group: dict[str, Any]) -> Any:
        return state["sum"].sqrt() + group["eps"] if step else 0.0


def _solution(linear: Tensor, divisor: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the parameters that z and Q determine."""
    lr = float(group["lr"])
    shrunk = linear.sign() * (linear.abs() - lr * group["l1"]).clamp_min(0)
    if group["l21"]:
        rest = tuple(range(1, linear.dim()))
        size = math.prod(linear.shape[1:])
        norm = torch.linalg.vector_norm(shrunk, dim=rest, keepdim=True) if rest else shrunk.abs()
        limit = math.sqrt(size) * lr * group["l21"]
        shrunk = shrunk * (
            (norm - limit).clamp_min(0) / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        )
    return -shrunk / (divisor + 2 * lr * group["l2"])
