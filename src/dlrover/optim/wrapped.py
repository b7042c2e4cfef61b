"""Optimizers that wrap another one and share its parameters, options and state."""

from __future__ import annotations

from typing import Any

import torch


class WrappedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """Base of optimizers around a base optimizer.

    Learning rate schedules, gradient clipping and checkpoints take it for the base optimizer: ``param_groups`` and
    ``state`` are the same objects.
    """

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base: Any = None
        super().__init__(base.param_groups, dict(base.defaults))
        self.base = base
        self._share()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the base optimizer."""
        if self.base is None:  # PyTorch's constructor adds those that the base optimizer has
            super().add_param_group(param_group)
        else:
            self.base.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the base optimizer's state."""
        self.base.load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        self.param_groups, self.state = self.base.param_groups, self.base.state
