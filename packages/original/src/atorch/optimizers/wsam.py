"""WSAM, with ATorch's name and parameters."""

from __future__ import annotations

from typing import Any

import torch

from dlrover.optim import WSAM

__all__ = ["WeightedSAM"]


class WeightedSAM(WSAM):
    """`dlrover.optim.WSAM` with ATorch's parameters."""

    def __init__(  # noqa: PLR0913 - ATorch's signature
        self,
        model: torch.nn.Module,
        base_optimizer: torch.optim.Optimizer,
        rho: float = 0.05,
        gamma: float = 0.9,
        sam_eps: float = 1e-12,
        adaptive: bool = False,
        decouple: bool = True,
        max_norm: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(
            model, base_optimizer, rho, gamma,
            adaptive=adaptive, decouple=decouple, max_norm=max_norm, eps=sam_eps,
        )  # fmt: skip
