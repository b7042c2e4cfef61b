"""What optimizers have in common: the step, states with types of their own, work row by row; and wrapping another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from dlrover.errors import ConfigurationError
from dlrover.optim.tensors import local, parameters, saved_states

CACHED, TEMPORARY = 1 << 16, 1 << 24
"""Elements that are updated at once on the CPU, few enough for its cache, and elsewhere, which bounds the memory."""


class Algorithm(Protocol):
    """What an optimizer keeps of each parameter, and how it updates parameters with that."""

    @property
    def eager(self) -> bool:
        """Whether states are made with the optimizer, so that a load finds how they are spread."""

    def begin(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """Return the state of a parameter before its first step, without ``step``."""

    def update(
        self, step: int, members: dict[int, tuple[Tensor, dict[str, Tensor]]], group: dict[str, Any]
    ) -> None:
        """Update parameters and their states, by their numbers in the optimizer, in the step of this number."""


class DenseOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Base of optimizers whose state is at least float32 and has a ``step`` for each parameter."""

    computes_parameters = False
    """Whether a step computes the parameters from the state, and so undoes what others have changed since the last one."""

    def __init__(self, params: Any, defaults: dict[str, Any], algorithm: Algorithm) -> None:
        self._algorithm = algorithm
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_algorithm": self._algorithm}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer's groups."""
        super().add_param_group(param_group)
        if self._algorithm.eager:
            for parameter in param_group["params"]:
                if parameter.requires_grad:
                    self._begin(parameter, param_group)

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
        numbers = {each: number for number, each in enumerate(parameters(self.param_groups))}
        for group in self.param_groups:
            by_step: dict[int, dict[int, tuple[Tensor, dict[str, Tensor]]]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                self._check(parameter.grad)
                state = self.state[parameter] or self._begin(parameter, group)
                state["step"] += 1
                by_step.setdefault(int(state["step"]), {})[numbers[parameter]] = parameter, state
            for step, members in by_step.items():
                self._algorithm.update(step, members, group)
                for parameter, _ in members.values():
                    # The update writes to this rank's part, and a backward pass looks at the whole.
                    if local(parameter) is not parameter:
                        torch.autograd.graph.increment_version(parameter)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, with its own types, or float32: PyTorch would convert it to those of the parameters.

        Raises:
            ConfigurationError: it is of another optimizer, without an option of this one or with one that this one does
                not have.
        """
        for group in state_dict["param_groups"]:
            for option in self.defaults:
                if option not in group:
                    raise ConfigurationError(
                        f"The state has no {option}, an option of {type(self).__name__}; it must be of the same kind of"
                        " optimizer."
                    )
            for option in ("amsgrad", "maximize"):
                if group.get(option) and option not in self.defaults:
                    raise ConfigurationError(
                        f"The state is of an optimizer with {option}=True, which {type(self).__name__} does not have;"
                        " continue with that optimizer."
                    )
        super().load_state_dict(state_dict)
        for parameter, saved in saved_states(self.param_groups, state_dict):
            for key, value in saved.items():
                if key != "step" and isinstance(value, Tensor):
                    kind = value.dtype
                    # PyTorch's optimizers keep those of bfloat16 parameters as bfloat16.
                    if kind.is_floating_point:
                        kind = torch.promote_types(kind, torch.float32)
                    self.state[parameter][key] = value.detach().to(local(parameter).device, kind)

    def _begin(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        step = {"step": torch.zeros((), dtype=torch.float32)}
        state: dict[str, Tensor] = self.state[parameter]
        state |= step | self._algorithm.begin(parameter, group)
        return state

    def _check(self, gradient: Tensor) -> None:
        if gradient.is_sparse or gradient.is_complex():
            kind = "sparse" if gradient.is_sparse else "complex"
            name = type(self).__name__
            raise ConfigurationError(f"{name} got a {kind} gradient; it accepts dense real ones.")


def check_ranges(**values: float) -> None:
    """Raise `ConfigurationError` for a value below 0."""
    for name, value in values.items():
        if not value >= 0:
            raise ConfigurationError(f"{name} is {value}; it must be 0 or more.")


def check_betas(betas: tuple[float, float]) -> None:
    """Raise `ConfigurationError` unless these can be decay rates."""
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigurationError(f"betas is {betas}; they must be from 0 to below 1.")


def by_rows(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of some rows of tensors with the same number of rows; a number is one row."""
    first = tensors[0]
    if not first.dim():
        yield tuple(tensors)
        return
    elements = CACHED if first.device.type == "cpu" else TEMPORARY
    rows = max(elements * len(first) // max(first.numel(), 1), 1)
    yield from zip(*(each.split(rows) for each in tensors), strict=True)


class WrappedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Base of optimizers around a base optimizer.

    Learning rate schedules, gradient clipping and checkpoints take it for the base optimizer: ``param_groups`` and
    ``state`` are that one's, also after a state was loaded into it directly.
    """

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.computes_parameters: bool = getattr(base, "computes_parameters", False)
        self.base: Any = SimpleNamespace()  # gets what PyTorch's constructor sets
        super().__init__(base.param_groups, dict(base.defaults))
        self.base = base

    def __getstate__(self) -> dict[str, Any]:
        # As in PyTorch's optimizers, a copy has neither hooks nor what a schedule has put around `step`.
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("step", "_opt_called") and not name.startswith("_optimizer_")
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The base optimizer's groups of parameters."""
        groups: list[dict[str, Any]] = self.base.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        """The base optimizer's states, by parameter."""
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the base optimizer."""
        # PyTorch's constructor adds those that the base optimizer has.
        if isinstance(self.base, SimpleNamespace):
            super().add_param_group(param_group)
        else:
            self.base.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the base optimizer's state."""
        self.base.load_state_dict(state_dict)
