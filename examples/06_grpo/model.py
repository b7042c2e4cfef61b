"""The task, and a small transformer that is built from its configuration.

A prompt is four digits; the right answer is the same digits, each one larger (9 becomes 0). The reward of an answer
is the share of its digits that are right, so an untrained model gets about 0.1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

DIGITS, LENGTH = 6, 4
START = DIGITS
"""Token between prompt and answer."""


def prompts(batch: int, count: int) -> list[list[int]]:
    """Return the prompts of a batch; its number alone decides about them."""
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(DIGITS, (count, LENGTH), generator=generator).tolist()


def reward(prompt: list[int], answer: list[int]) -> float:
    return sum(digit == (prompt[-1] + 1) % DIGITS for digit in answer) / LENGTH


class Model(nn.Module):
    """A causal transformer over prompt, start token and answer."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(DIGITS + 1, width)
        self.places = nn.Parameter(0.1 * torch.randn(2 * LENGTH + 1, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, 0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next token, (batch, length, digits)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.layers(self.tokens(tokens) + self.places[:length], mask=mask, is_causal=True)
        return self.head(hidden)


def build(settings: dict[str, Any]) -> Model:
    return Model(**settings["model"])


def start(prompt: torch.Tensor) -> torch.Tensor:
    """Return prompts, (batch, 4), with the start token behind each."""
    return torch.cat([prompt, torch.full((len(prompt), 1), START)], 1)


@torch.no_grad()
def generate(model: nn.Module, prompt: torch.Tensor, *, greedy: bool = False) -> torch.Tensor:
    """Return an answer for each prompt, (batch, 4)."""
    tokens = start(prompt)
    for _ in range(LENGTH):
        logits = model(tokens)[:, -1]
        chosen = logits.argmax(-1) if greedy else torch.multinomial(logits.softmax(-1), 1)[:, 0]
        tokens = torch.cat([tokens, chosen[:, None]], 1)
    return tokens[:, -LENGTH:]


def log_probabilities(model: nn.Module, prompt: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Return that of each digit of the answers, (batch, 4)."""
    logits = model(torch.cat([start(prompt), answer[:, :-1]], 1))[:, -LENGTH:]
    return functional.log_softmax(logits, -1).gather(-1, answer[..., None])[..., 0]
