"""What a rank that joins takes beside models and optimizers, so that it trains as the others do.

A gradient is *kept* at the beginning of a step if its optimizer has not stepped since a pass: a program with two
optimizers may step one of them less often. Outside of the models, there are parameters that an optimizer trains, and the
running statistics of normalization layers, which follow from outputs that a rank on its way does not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dlrover.training.replicas.sharded import local


class KeptGradients:
    """Gradients that are kept, as part of a replica's state: those of each optimizer, by its name."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        """``parts`` has the optimizers by their names, among others."""
        self._parts = parts
        self._passes = 0
        self._used: dict[int, int] = {}
        """The number of passes at the last step of an optimizer, by its id."""

    def passed(self) -> None:
        """Note a pass that may add to gradients."""
        self._passes += 1

    def used(self, optimizer: Any) -> None:
        """Note a step of an optimizer."""
        self._used[id(optimizer)] = self._passes

    def state_dict(self) -> dict[str, list[torch.Tensor | None]]:
        """Return the gradients of the optimizers that have not stepped since a pass."""
        return {
            name: [parameter.grad for parameter in parameters_of(part)]
            for name, part in self._parts.items()
            if name.startswith("optimizer") and self._used.get(id(part), 0) < self._passes
        }

    def load_state_dict(self, state: dict[str, list[torch.Tensor | None]]) -> None:
        """Take the gradients that another rank has kept."""
        for name, gradients in state.items():
            parameters = parameters_of(self._parts[name])
            for parameter, gradient in zip(parameters, gradients, strict=True):
                there = None if gradient is None else gradient.to(device=parameter.device)
                parameter.grad = there


class Beside:
    """Parameters that optimizers train, and running statistics, which no model has, as part of a replica's state."""

    def __init__(
        self,
        trained: Callable[[], Sequence[torch.Tensor]],
        norms: Sequence[Callable[[], Any]],
        held: Callable[[], set[int]],
    ) -> None:
        """``norms`` return the normalization layers in the order of their making, or None; ``held`` the ids of what models have."""
        self._trained, self._norms, self._held = trained, norms, held

    def _tensors(self) -> dict[str, torch.Tensor]:
        held = self._held()
        found = {f"parameter {i}": one for i, one in enumerate(self._trained())}
        for i, made in enumerate(self._norms):
            layer = made()
            found |= {f"layer {i} {name}": one for name, one in layer.named_buffers()} if layer is not None else {}  # fmt: skip
        return {name: local(one) for name, one in found.items() if id(one) not in held}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return them as this rank has them."""
        return self._tensors()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take those of another rank; either one may still have a layer that the program has dropped."""
        own = self._tensors()
        for name in own.keys() & state.keys():
            own[name].copy_(state[name])


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
