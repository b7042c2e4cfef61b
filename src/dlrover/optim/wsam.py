"""WSAM (Yue et al., "Sharpness-Aware Minimization Revisited: Weighted Sharpness as a Regularization Term", KDD 2023)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dlrover.errors import ConfigurationError
from dlrover.optim.dense import WrappedOptimizer
from dlrover.optim.tensors import local, parameters


class WSAM(WrappedOptimizer):
    """An optimizer that minimizes the loss and, with a weight, its sharpness: its rise within a distance of ``rho``.

    With g the gradient at w, e = rho g / |g|, h the gradient at w + e, and a = gamma / (1 - gamma)::

        decoupled:  base step with g, then w = w - lr a (h - g)
        coupled:    base step with a h + (1 - a) g

    ``gamma=0`` is the base optimizer, ``gamma=0.5`` coupled is SAM, more seeks flatter minima. A step computes the loss
    twice, through a closure::

        optimizer = WSAM(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()
            return loss

        optimizer.step(closure)

    The gradients are those of the global batch in both passes, with DDP, FSDP2 and tensor parallelism; so the result
    does not depend on the number of ranks.

    Args:
        model: module with the parameters; its batch normalization keeps its running statistics in the second pass.
        base: optimizer of the parameters.
        rho: distance.
        gamma: weight of the sharpness, from 0 to below 1.
        adaptive: True to scale the distance by the parameters (ASAM): e = rho w² g / |w g|.
        decouple: False for the coupled form.
        max_norm: maximum norm of the gradients g and h, if any.
        eps: term of the denominators |g| and |w g|.

    Raises:
        ConfigurationError: an argument is out of its range.
    """

    def __init__(  # noqa: PLR0913 - options, by name
        self,
        model: torch.nn.Module,
        base: torch.optim.Optimizer,
        rho: float = 0.05,
        gamma: float = 0.9,
        *,
        adaptive: bool = False,
        decouple: bool = True,
        max_norm: float | None = None,
        eps: float = 1e-12,
    ) -> None:
        if not rho >= 0:
            raise ConfigurationError(f"rho is {rho}; it must be 0 or more.")
        if not 0 <= gamma < 1:
            raise ConfigurationError(f"gamma is {gamma}; it must be from 0 to below 1.")
        if max_norm is not None and not max_norm > 0:
            raise ConfigurationError(f"max_norm is {max_norm}; it must be more than 0, or None.")
        if decouple and gamma and getattr(base, "computes_parameters", False):
            raise ConfigurationError(
                f"decouple is True with {type(base).__name__}, whose next step undoes what WSAM adds to its steps, because it"
                " computes the parameters from its states; it must be False."
            )
        super().__init__(base)
        self._model = model
        self._rho, self._weight = rho, gamma / (1 - gamma)
        self._adaptive, self._decouple = adaptive, decouple
        self._max_norm, self._eps = max_norm, eps
        self._before: list[Tensor] = []
        self._gradients: list[Tensor] = []

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step.

        Args:
            closure: function that sets the gradients to those of the batch and returns the loss.

        Returns:
            The loss at the parameters before the step.

        Raises:
            ConfigurationError: there is no closure.
        """
        if closure is None:
            raise ConfigurationError(
                "WSAM.step got no closure; it needs one that computes the gradients, which it calls twice."
            )
        compute = torch.enable_grad()(closure)
        loss = compute()
        if not self._weight:
            self._clip()
            self.base.step()
            return loss
        moved = [each for each in parameters(self.param_groups) if each.grad is not None]
        before = self._keep(self._before, moved)
        factor = self._factor(moved)
        try:
            for each in moved:
                away = each.grad.to(_wide(each))
                if self._adaptive:
                    away = away * each.square()
                each.add_(away * factor.to(away.dtype))
            self._clip()
            gradients = self._keep(self._gradients, [each.grad for each in moved])
            with _frozen_statistics(self._model):
                compute()
        finally:  # also if memory ran out, or Ctrl-C came: the program may go on, or save
            _copy(moved, before)
        self._clip()
        self._finish(moved, gradients)
        return loss

    def _keep(self, kept: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
        """Copy tensors to memory that is kept from step to step: making it new takes longer than the copy."""
        if [(each.shape, each.dtype) for each in kept] != [(t.shape, t.dtype) for t in tensors]:
            kept[:] = [torch.empty_like(each) for each in tensors]
        _copy(kept, tensors)
        return kept

    def _factor(self, moved: list[Tensor]) -> Tensor:
        """Return the factor of the gradient, or with ``adaptive`` of w² g, in e."""
        if self._adaptive:
            return self._rho / (
                _norm([each.grad.to(_wide(each)) * each for each in moved]) + self._eps
            )
        return self._rho / (_norm([each.grad for each in moved]) + self._eps)

    def _finish(self, moved: list[Tensor], gradients: list[Tensor]) -> None:
        """Step with the gradients at both places; ``grad`` holds those of the second."""
        weight = self._weight
        for each, gradient in zip(moved, gradients, strict=True):
            # The second pass may not use a parameter, such as one of layers that are skipped at random.
            if each.grad is None:
                each.grad = torch.zeros_like(gradient)
        if not self._decouple:
            if weight != 1:  # SAM, to the bit
                for each, gradient in zip(moved, gradients, strict=True):
                    each.grad.mul_(weight).add_(gradient, alpha=1 - weight)
            self.base.step()
            return
        there = [each.grad for each in moved]
        for each, gradient in zip(moved, gradients, strict=True):
            each.grad = gradient
        self.base.step()
        rates = {each: group["lr"] for group in self.param_groups for each in group["params"]}
        for each, gradient, other in zip(moved, gradients, there, strict=True):
            rate = float(rates[each]) * weight
            each.sub_(other.to(_wide(each)) - gradient, alpha=rate)
            each.grad = other

    def _clip(self) -> None:
        """Limit the norm of the gradients; PyTorch's function does not take plain tensors beside spread ones."""
        found = [each.grad for each in parameters(self.param_groups) if each.grad is not None]
        if self._max_norm is not None and found:
            factor = (self._max_norm / (_norm(found) + 1e-6)).clamp_max(1)
            for each in found:
                each.mul_(factor.to(each.dtype))


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    torch._foreach_copy_([local(each) for each in targets], [local(each) for each in sources])


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the type to compute in: norms and factors of 16-bit gradients overflow, or become 0, in their own."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm of all elements together, of all ranks that share spread tensors, as float32 or wider."""
    norms = [torch.linalg.vector_norm(each, dtype=_wide(each)) for each in tensors]
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in norms]
    dtype = functools.reduce(torch.promote_types, [each.dtype for each in whole])
    return torch.linalg.vector_norm(
        torch.stack([each.to(whole[0].device, dtype) for each in whole])
    )


@contextlib.contextmanager
def _frozen_statistics(model: torch.nn.Module) -> Iterator[None]:
    """Let batch normalization in training use the batch's statistics only, and keep the running ones."""
    kind = torch.nn.modules.batchnorm._BatchNorm  # noqa: SLF001
    modules = [
        each
        for each in model.modules()
        if isinstance(each, kind) and each.training and each.track_running_stats
    ]
    for each in modules:
        each.track_running_stats = False
    try:
        yield
    finally:
        for each in modules:
            each.track_running_stats = True
