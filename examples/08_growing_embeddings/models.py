"""DeepFM and DLRM on rows that a table gives; all else of them are parameters as usual."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn


def layers(*sizes: int) -> nn.Sequential:
    """A perceptron, without an activation at its end."""
    found: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        found += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*found[:-1])


class DeepFM(nn.Module):
    """A factorization machine and a perceptron on the same vectors (Guo et al., IJCAI 2017).

    A row is a weight and a vector.
    """

    def __init__(self, features: int, dim: int, numbers: int) -> None:
        super().__init__()
        self.row = 1 + dim
        self.deep = layers(features * dim + numbers, 64, 32, 1)
        self.linear = nn.Linear(numbers, 1)

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Return logits ``(n,)`` for rows ``(n, features * row)``."""
        rows = rows.unflatten(1, (-1, self.row))
        weights, vectors = rows[..., 0], rows[..., 1:]
        pairs = (vectors.sum(1).square() - vectors.square().sum(1)).sum(1) / 2
        deep = self.deep(torch.cat([vectors.flatten(1), numbers], 1))
        return weights.sum(1) + pairs + deep[:, 0] + self.linear(numbers)[:, 0]


class DLRM(nn.Module):
    """Inner products of all pairs of vectors, one of which stands for the numbers (Naumov et al., 2019)."""

    def __init__(self, features: int, dim: int, numbers: int) -> None:
        super().__init__()
        self.row = dim
        self.bottom = layers(numbers, 32, dim)
        self.register_buffer(
            "pairs", torch.tril_indices(features + 1, features + 1, -1), persistent=False
        )
        self.top = layers(dim + self.pairs.shape[1], 64, 32, 1)

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Return logits ``(n,)`` for rows ``(n, features * row)``."""
        dense = self.bottom(numbers).relu()
        vectors = torch.cat([dense[:, None], rows.unflatten(1, (-1, self.row))], 1)
        products = vectors @ vectors.transpose(1, 2)
        found = products[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, found], 1))[:, 0]
