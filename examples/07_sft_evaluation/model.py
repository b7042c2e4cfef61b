"""The data, and a small transformer: instructions to sort three digits, and their answers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

DIGITS, LENGTH = 6, 3
START = DIGITS
HELD_OUT = 10**6
"""Seeds from here on are not trained on."""


def batch(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, (count, 6), and their targets: answers follow from the instructions only."""
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(DIGITS, (count, LENGTH), generator=generator)
    answers = digits.sort(1).values
    tokens = torch.cat([digits, torch.full((count, 1), START), answers[:, :-1]], 1)
    return tokens, answers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(DIGITS + 1, 32)
        self.places = nn.Parameter(0.1 * torch.randn(2 * LENGTH, 32))
        layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, DIGITS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the answers, (batch, 3, digits)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.layers(self.tokens(tokens) + self.places, mask=mask, is_causal=True)
        return self.head(hidden)[:, -LENGTH:]


def loss_of(model: nn.Module, tokens: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), answers.flatten())
