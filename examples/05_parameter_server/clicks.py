"""Clicks that are made up: some words are seen far more often than others, and each has its own appeal."""

from __future__ import annotations

import torch
from torch import Tensor

WORDS = 1 << 16
"""Words that there are, the most frequent one first."""
SEEN = 8
"""Words of one sample."""


class Clicks:
    """Samples by their number: the words that somebody has seen, and whether there was a click."""

    def __init__(self, count: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        drawn = torch.rand(count, SEEN, generator=random)
        self._words = (WORDS * drawn**2.5).long()  # the first half of all words is drawn in 76 %
        appeal = torch.randn(WORDS, generator=random)
        chance = torch.sigmoid(appeal[self._words].sum(1))
        self._clicked = (torch.rand(count, generator=random) < chance).float()

    def __len__(self) -> int:
        return len(self._clicked)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._words[index], self._clicked[index]
