"""Fragments: the parameters that are synchronized together, with their values at the last sync and their outer optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dlrover.errors import ConfigurationError
from dlrover.optim.local.exchange import Residuals
from dlrover.optim.machine.penalty import Statistics
from dlrover.optim.tensors import local

Outer = Callable[[list[Tensor]], torch.optim.Optimizer]
"""Makes the outer optimizer of a fragment from its global parameters. It must work element by element."""


class Fragment:
    """Parameters of this rank that are synchronized together.

    ``shared`` holds the parameters of the last sync, in float32 or wider, which are the same in all replicas. The
    difference to the parameters since, shared minus local, is this replica's pseudo-gradient. Shared ones count as the
    parameters' type can hold them: else what it cuts off would be a pseudo-gradient, and undo small outer steps.
    """

    def __init__(self, parameters: Sequence[Tensor], outer: Outer, device: Any) -> None:
        self.parameters = list(parameters)
        dtypes = [torch.promote_types(each.dtype, torch.float32) for each in parameters]
        self.dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        self.shared = [
            torch.nn.Parameter(local(each).detach().to(device, dtype, copy=True).contiguous())
            for each, dtype in zip(parameters, dtypes, strict=True)
        ]
        self.outer = outer(self.shared)
        self.residuals = Residuals()
        self.statistics = Statistics()
        self._make_outer_state()

    def difference(self) -> Tensor:
        """Return this rank's part of the pseudo-gradient, as one vector on the parameters' device."""
        parts = [
            (shared.to(place.device, place.dtype).to(self.dtype) - place).flatten()
            for shared, place in self._pairs()
        ]
        return torch.cat(parts)

    def squares(self, vector: Tensor, replica_size: int) -> float:
        """Return the sum of squares of a vector like `difference`, a part of the sum over the replica's ranks.

        What several of these ranks hold is divided among them.
        """
        total, at = 0.0, 0
        for parameter, shared in zip(self.parameters, self.shared, strict=True):
            part = vector[at : at + shared.numel()]
            at += shared.numel()
            norm = torch.linalg.vector_norm(part, dtype=torch.float64).item()
            total += norm * norm / _copies(parameter, replica_size)
        return total

    def step(self, gradient: Tensor) -> None:
        """Let the outer optimizer step with the mean pseudo-gradient."""
        at = 0
        for shared in self.shared:
            part = gradient[at : at + shared.numel()]
            shared.grad = part.view(shared.shape).to(shared.device, shared.dtype)
            at += shared.numel()
        self.outer.step()
        self.outer.zero_grad()

    def take(self, keep: float) -> None:
        """Set the parameters to the shared ones; keep a part of their own difference."""
        for shared, place in self._pairs():
            value = shared.to(place.device, place.dtype)
            if keep:
                place.lerp_(value, 1 - keep)
            else:
                place.copy_(value)

    def check_sum(self) -> int:
        """Return a number below 2**40 that differs, in all likelihood, if a shared bit differs."""
        total = 0
        for shared in self.shared:
            words = shared.detach().view(-1).view(torch.int32)
            total += int(words.sum(dtype=torch.int64))
        return total % (1 << 40)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all that replicas have in common: shared parameters and the outer optimizer's state."""
        for shared in self.shared:
            yield shared.detach()
            yield from (value for _, value in self.outer_state(shared))

    def outer_state(self, shared: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the outer optimizer keeps for a shared parameter, in the same order in all replicas."""
        for key, value in sorted(self.outer.state[shared].items()):
            if isinstance(value, Tensor):
                yield key, value

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the shared and this rank's part of each parameter."""
        for shared, parameter in zip(self.shared, self.parameters, strict=True):
            yield shared.detach(), local(parameter).detach()

    def _make_outer_state(self) -> None:
        """Step once without effect: then replicas and checkpoints know the state's tensors before the first sync."""
        made = [
            {key: value.clone() for key, value in self.outer_state(each)} for each in self.shared
        ]
        rates = [group["lr"] for group in self.outer.param_groups]
        for group in self.outer.param_groups:
            group["lr"] = 0.0
        for shared in self.shared:
            shared.grad = torch.zeros_like(shared)
        self.outer.step()
        self.outer.zero_grad()
        for group, rate in zip(self.outer.param_groups, rates, strict=True):
            group["lr"] = rate
        for shared, before in zip(self.shared, made, strict=True):
            for key, value in self.outer_state(shared):
                # Some optimizers make states with themselves, not all of them zeros, as Adagrad.
                value.copy_(before.get(key, torch.zeros_like(value)))


def divided(parameters: list[Tensor], fragments: int) -> list[list[Tensor]]:
    """Divide parameters, in order, into parts of nearly the same number of elements.

    Raises:
        ConfigurationError: there are fewer parameters than parts.
    """
    if not 1 <= fragments <= len(parameters):
        raise ConfigurationError(
            f"fragments is {fragments}; accepted are 1 to {len(parameters)}, the number of parameters."
        )
    total, done = sum(each.numel() for each in parameters), 0
    parts: list[list[Tensor]] = [[] for _ in range(fragments)]
    at = 0
    for index, each in enumerate(parameters):
        left = len(parameters) - index
        full = done + each.numel() / 2 >= total * (at + 1) / fragments
        if parts[at] and at + 1 < fragments and (full or left <= fragments - at - 1):
            at += 1
        parts[at].append(each)
        done += each.numel()
    return parts


def _copies(parameter: Tensor, replica_size: int) -> int:
    """Return how many of a replica's ranks hold the same part of a parameter."""
    if not hasattr(parameter, "device_mesh"):
        return replica_size
    parts = 1
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        parts *= 1 if placement.is_replicate() else size
    return max(replica_size // parts, 1)
