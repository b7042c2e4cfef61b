"""What a program's layers keep, traced on fake tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlrover.accelerate import Cluster, Strategy, Transformer, predict
from dlrover.errors import ConfigurationError

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

LLAMA_8B = Transformer(32, 4096, 14336, 32, 8, 128256)


class Plain(torch.nn.Module):
    """Layers that keep what is known: a product's input, and the output of the activation's square."""

    def __init__(self, layers: int, width: int = 256) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(1000, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(width, width, bias=False) for _ in range(layers)
        )

    def forward(self, ids):
        states = self.table(ids)
        for layer in self.layers:
            states = torch.relu(layer(states))
        return states


class Llama(torch.nn.Module):
    """A Llama of plain modules."""

    def __init__(self, layers: int, shape: Transformer = LLAMA_8B) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(shape.vocab, shape.hidden)
        self.layers = torch.nn.ModuleList(Block(shape) for _ in range(layers))
        self.head = torch.nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, ids):
        states = self.table(ids)
        for layer in self.layers:
            states = layer(states)
        return self.head(states)


class Block(torch.nn.Module):
    """A layer of :class:`Llama`."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.width = shape.width
        keys = shape.kv_heads * shape.width
        sizes = {
            "q": (shape.hidden, shape.hidden), "k": (shape.hidden, keys), "v": (shape.hidden, keys),
            "o": (shape.hidden, shape.hidden), "gate": (shape.hidden, shape.ffn),
            "up": (shape.hidden, shape.ffn), "down": (shape.ffn, shape.hidden),
        }  # fmt: skip
        for name, size in sizes.items():
            setattr(self, name, torch.nn.Linear(*size, bias=False))
        self.first, self.second = (torch.nn.RMSNorm(shape.hidden) for _ in range(2))

    def forward(self, states):
        normed = self.first(states)
        q, k, v = (
            each(normed).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        states = states + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.second(states)
        return states + self.down(torch.nn.functional.silu(self.gate(normed)) * self.up(normed))


def test_a_layer_keeps_what_its_operations_keep():
    shape = Transformer(4, 256, 256, 4, 4, 1000)
    # the output of relu is the next layer's input: one tensor in bf16
    assert traced_of(shape, Plain).kept == 2 * 256


def traced_of(shape, make, **options):
    from dlrover.accelerate import traced

    return traced(shape, make, **options)


def test_a_layer_of_a_large_model_is_traced_without_its_memory():
    shape = traced_of(LLAMA_8B, Llama)
    assert 40 * 4096 < shape.kept < 60 * 4096  # more than fused kernels keep
    assert shape.kept == pytest.approx(traced_of(LLAMA_8B, Llama, sequence=1024).kept, rel=0.01)
    assert torch.get_default_dtype() == torch.float32


def test_predictions_use_what_was_traced():
    strategy = Strategy(dp_shard=8)

    def gib(shape, one):
        found = predict(shape, one, Cluster(), sequence=4096, global_batch=64)
        return found.parts["activations"]

    counted = gib(LLAMA_8B, strategy)
    kept = counted * 2**30 / 32 / 4096
    assert gib(replace(LLAMA_8B, kept=1.5 * kept), strategy) == pytest.approx(1.5 * counted)
    fused = replace(strategy, compile=True)
    assert gib(replace(LLAMA_8B, kept=1.5 * kept), fused) == gib(LLAMA_8B, fused)
    full = replace(strategy, recompute="full")
    assert gib(replace(LLAMA_8B, kept=1.5 * kept), full) == gib(LLAMA_8B, full)


def test_a_model_that_does_not_grow_is_refused():
    with pytest.raises(ConfigurationError, match="make must add a layer"):
        traced_of(LLAMA_8B, lambda _: Plain(1))
    with pytest.raises(ConfigurationError, match="kept is -1"):
        replace(LLAMA_8B, kept=-1)
