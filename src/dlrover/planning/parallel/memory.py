"""Device memory of the fullest rank of a strategy. Needs numpy.

The bytes that a block keeps for its backward pass are counted operation by operation, as in Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models" (2022), for flash attention and bf16. What a program
adds to that (kernels that are not fused, copies, the allocator's gaps) is measured: see ``benchmarks/parallel.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dlrover.planning.parallel.columns import Columns
from dlrover.planning.parallel.records import Strategy, Transformer
from dlrover.planning.parallel.stages import stages

GIB = float(1 << 30)

LOGIT_BYTES = 9.0
"""Bytes of a logit while the loss is computed: bf16, its fp32 copy, the softmax and its gradient."""
LOGIT_BYTES_GATHERED = 12.0
"""The same with ZeRO's stage 3 and under autocast, where programs compute the loss with kernels that are not fused."""
LOGIT_BYTES_FUSED = 6.0
"""The same if one kernel computes the loss: bf16, and fp32 that turns into the softmax in place."""
STREAM, STREAM_AUTOCAST = 8, 26
"""Bytes that a layer keeps of each element of its input, besides attention and the feed-forward layer.

In bf16, these are the inputs and outputs of both norms. Under autocast they are in fp32: of each norm its input and the normalized input, and
for each of the five matrices that follow a norm its input in bf16.
"""
CHUNKS = 8
"""Chunks of the sequence in a chunked loss."""
COPIES = 2.0
"""Bytes of a gated layer's activation that its activation function keeps unless it is fused with the product."""
GAPS = 0.06
"""Memory that the allocator reserves beyond what is allocated, as a part of all that is not a state."""
GAPS_TENSOR = 0.12
"""The same with tensor parallelism, whose collectives need buffers of other sizes."""
GAPS_GATHERED = 0.10
"""The same if parameters are gathered and freed layer by layer, on streams of their own."""
GAPS_COMPILED = 0.03
WORKSPACE = 0.4 * GIB
"""Bytes of libraries' workspaces that the allocator sees."""
LOW, HIGH = 0.93, 1.2
"""Interval of the memory, as parts of the prediction: 80 % of runs lie in it, if each set of runs counts alike."""
LOW_GATHERED, HIGH_GATHERED = 0.93, 1.08
"""The same with ZeRO's stage 3."""


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on the fullest rank, by purpose; one element per strategy."""

    states: Any
    gathered: Any
    activations: Any
    transient: Any
    loss: Any
    reserve: Any
    """Workspaces, and gaps of the allocator."""
    stage: Any
    """Pipeline stage of this rank."""

    PARTS = ("states", "gathered", "activations", "transient", "loss", "reserve")

    @property
    def active(self) -> Any:
        """Bytes allocated at the peak."""
        return self.states + self.gathered + self.activations + self.transient + self.loss

    @property
    def total(self) -> Any:
        """Bytes reserved."""
        return self.active + self.reserve


def memory(model: Transformer, of: Columns, sequence: int, global_batch: int) -> MemoryUse:
    """Return the memory of the fullest rank of each strategy.

    That is a rank of the first stage, which has most micro-batches in flight, or of the last one, which has the loss.
    """
    blocks = Blocks(model, of, sequence)
    first = rank(blocks, global_batch, first=True)
    last = rank(blocks, global_batch, first=False)
    fuller = first.total >= last.total
    names = (*MemoryUse.PARTS, "stage")
    return MemoryUse(**{n: np.where(fuller, getattr(first, n), getattr(last, n)) for n in names})


def interval(of_rank: MemoryUse, of: Columns) -> tuple[Any, Any]:
    """Return the bytes that 80 % of the runs with such a prediction lie between."""
    sharded, total = of.stage == 3, of_rank.total
    return np.where(sharded, LOW_GATHERED, LOW) * total, np.where(
        sharded, HIGH_GATHERED, HIGH
    ) * total


class HeadWidths(NamedTuple):
    """Widths of all heads on a rank."""

    queries: Any
    keys: Any
    values: Any
    outputs: Any


@dataclass(frozen=True)
class Blocks:
    """What one layer of a model takes on a rank."""

    model: Transformer
    of: Columns
    sequence: int

    @property
    def autocast(self) -> Any:
        """True where the program runs under autocast."""
        return (self.of.stage == 0) & self.model.autocast

    @property
    def load(self) -> Any:
        """Tokens of the experts' rank with most of them, as a multiple of the average."""
        return np.where(self.of.ep > 1, np.minimum(self.model.imbalance, self.of.ep), 1.0)

    @property
    def tokens(self) -> Any:
        """Tokens of a micro-batch on a rank."""
        return self.of.micro_batch * self.sequence / self.of.cp

    @property
    def heads(self) -> HeadWidths:
        """Widths of a rank's heads: it has at least one head of keys."""
        model, tp = self.model, self.of.tp
        queries, keys = (
            model.heads / tp,
            np.minimum(np.maximum(model.kv_heads / tp, 1.0), model.kv_heads),
        )
        both = model.width + model.rope_dim
        return HeadWidths(
            queries * both, keys * both, keys * model.value_width, queries * model.value_width
        )

    @property
    def vocab(self) -> Any:
        """Rows of the embedding on a rank, padded to a multiple of 128."""
        return 128 * np.ceil(self.model.vocab / (128 * self.of.tp))

    @property
    def attention(self) -> Any:
        """Parameters of attention, router, norms and shared experts on a rank."""
        model = self.model
        of_heads = sum(self.heads) * model.hidden
        if model.kv_lora:
            # all ranks have the matrices that compress
            of_heads = model.hidden * model.latent + sum(model.projections) / self.of.tp
        shared = model.shared_experts * model.expert / self.of.tp
        return of_heads + model.hidden * (2 + model.experts) + shared

    @property
    def dense(self) -> Any:
        """Parameters of the feed-forward layer of a layer without experts."""
        width = (self.model.dense_ffn if self.model.experts else 0) or self.model.ffn
        return self.model.expert / self.model.ffn * width / self.of.tp

    @property
    def experts(self) -> Any:
        """Parameters of a layer's experts on a rank."""
        of = self.of
        return self.model.experts * self.model.expert / (of.ep * of.expert_tensor())

    def kept(self, *, experts: bool) -> Any:
        """Bytes of a token that a layer keeps for its backward pass if nothing is recomputed."""
        count = self.counted(experts=experts)
        if not self.model.kept:
            return count
        alone = Blocks(replace(self.model, autocast=False), Columns.of([Strategy()]), self.sequence)
        # what the program keeps beyond the count is divided as the rest is; a compiler fuses it away
        more = self.model.kept / alone.counted(experts=bool(self.model.experts))
        return count * np.where(self.of.compile, 1.0, more)

    def counted(self, *, experts: bool) -> Any:
        """The same, counted from the operations of a layer."""
        model, of = self.model, self.of
        spread = np.where(of.sequence_parallel, of.tp, 1)
        stream = np.where(self.autocast, STREAM_AUTOCAST, STREAM) * model.hidden / spread
        # q, k and v; attention's output and the statistics of its softmax
        attention = 2 * sum(self.heads) + 4 * model.heads / of.tp
        if model.kv_lora:
            # before and after the norms of what is compressed; keys without their rotary part, which lie beside the values
            attention += 2 * (2 * model.latent - model.rope_dim) / spread
            attention += 2 * model.heads * model.width / of.tp
        return stream + attention + self.feed_forward(experts=experts)

    def feed_forward(self, *, experts: bool) -> Any:
        """Bytes of a token that the feed-forward layer keeps."""
        model, of = self.model, self.of
        # outputs of the first matrices, and what enters the last one
        each = 6 + np.where(of.compile | model.fused, 0.0, COPIES) if model.gated else 4
        if not experts:
            width = (model.dense_ffn if model.experts else 0) or model.ffn
            return each * width / of.tp
        split = of.expert_tensor()
        # a token's copies for its experts, and what they return; the router's scores
        sent = model.experts_per_token * self.load / of.tp
        moved, routed = 4 * model.hidden * split * sent, each * model.ffn * sent
        return moved + routed + each * model.ffn * model.shared_experts / of.tp + 8 * model.experts

    def saved(self, *, experts: bool) -> Any:
        """Bytes of a token that a layer keeps for its backward pass, by what is recomputed."""
        model, of = self.model, self.of
        queries, keys, values, outputs = self.heads
        spread = np.where(of.sequence_parallel, of.tp, 1)
        entered = np.where(self.autocast, 4, 2) * model.hidden / spread
        per = model.experts_per_token + model.shared_experts if experts else 1
        width = model.ffn if experts or not model.dense_ffn else model.dense_ffn
        # every second matrix product and attention's output stay, as in the policy of torch's examples
        inputs = 2 * model.latent / spread if model.kv_lora else 2 * queries + 2 * keys
        half = inputs + 2 * outputs + 2 * width * per / of.tp + 2 * model.hidden / spread
        # `auto_accelerate` keeps them all
        first = (4 if model.gated else 2) * width * per / of.tp
        inputs = 2 * (queries + keys + values) + (2 * model.latent / spread if model.kv_lora else 0)
        products = inputs + 2 * outputs + first + 4 * model.hidden / spread
        half = np.where(self.autocast, products, half)
        none = self.kept(experts=experts)
        return np.select([of.recompute == 0, of.recompute == 1], [none, entered + half], entered)

    def held(self, again: Any, *, experts: bool) -> Any:
        """Bytes of a token that a layer keeps on average if a part of the layers is recomputed."""
        kept, saved = self.kept(experts=experts), self.saved(experts=experts)
        return again * saved + (1 - again) * kept

    def transient(self, *, experts: bool) -> Any:
        """Bytes of a token that a layer takes while its backward pass runs."""
        model, of = self.model, self.of
        gathered = np.where(of.sequence_parallel & (of.tp > 1), 4 * model.hidden, 0)
        gradients = self.feed_forward(experts=experts) + 4 * model.hidden / of.tp
        again = np.maximum(self.kept(experts=experts) - self.saved(experts=experts), 0)
        return gathered + gradients + np.where(of.recompute > 0, again, 0)


def rank(blocks: Blocks, global_batch: int, *, first: bool) -> MemoryUse:
    """Memory of a rank of the first or the last stage."""
    model, of = blocks.model, blocks.of
    layers, dense = _layers(model, of, first=first)
    expert_layers = (layers - dense) if model.experts else np.zeros_like(layers)
    dense = layers - expert_layers
    flight = _in_flight(of, of.rounds(global_batch), first=first)
    alone = of.pp == 1
    ends = np.where(alone, 1.0 if model.tied else 2.0, 1.0)
    table = blocks.vocab * model.hidden
    shared = layers * blocks.attention + dense * blocks.dense + ends * table
    routed = expert_layers * blocks.experts
    states = _states(of, shared, of.shards)
    states = states + _states(of, routed, _expert_shards(of))
    layer = blocks.attention + (blocks.experts if model.experts else blocks.dense)
    # gradients of matrices before they are added up: experts' are alike, and take turns
    lone = blocks.attention + (model.expert / of.expert_tensor() if model.experts else blocks.dense)
    gathered = np.where(of.stage == 3, 6 * layer + 2 * ends * table, 2 * lone)
    again = of.recomputed(layers)
    per_token = dense * blocks.held(again, experts=False)
    if model.experts:
        per_token = per_token + expert_layers * blocks.held(again, experts=True)
    activations = blocks.tokens * per_token * flight
    transient = blocks.tokens * blocks.transient(experts=bool(model.experts))
    loss = np.where(of.pp == 1, _loss(blocks), 0.0) if first else _loss(blocks)
    # the loss is over when the first layer's backward pass begins, but its memory does not fit what follows
    other = np.where(of.stage == 3, np.minimum(loss, transient), 0.0)
    backward = transient
    transient, loss = (
        np.where(loss > transient, 0.0, transient),
        np.where(loss > transient, loss, 0.0),
    )
    if model.autocast:
        then = _under_autocast(
            blocks, states, activations, np.maximum(transient, loss), backward, again, global_batch
        )
        which = blocks.autocast
        states = np.where(which, then[0], states)
        activations = np.where(which, then[1], activations)
        transient = np.where(which, np.where(loss > 0, 0.0, then[2]), transient)
        loss = np.where(which, np.where(loss > 0, then[2], 0.0), loss)
    plain = np.where(of.tp > 1, GAPS_TENSOR, GAPS)
    gaps = np.where(of.stage == 3, np.where(of.compile, GAPS_COMPILED, GAPS_GATHERED), plain)
    reserve = WORKSPACE + other + gaps * (gathered + activations + transient + loss)
    if model.copied_gradients:
        # one buffer that no freed activation makes room for; without ZeRO, buckets of bf16
        each = np.select(
            [of.stage == 0, of.stage < 3], [2 * (of.dp * of.cp > 1), of.gradient_bytes]
        )
        reserve = reserve + each * (shared + routed)
    where = np.zeros_like(of.pp) if first else of.pp - 1
    return MemoryUse(states, gathered, activations, transient, loss, reserve, where)


def _under_autocast(
    blocks: Blocks,
    states: Any,
    activations: Any,
    loss: Any,
    transient: Any,
    again: Any,
    global_batch: int,
) -> tuple[Any, Any, Any]:
    """States, activations, and all that is alive for a moment, at the fuller of two moments of the first micro-batch.

    At the loss there are no gradients yet, but the weights of layers that are not recomputed in bf16. At the end of the
    backward pass it is the other way round. ``loss`` and ``transient`` are what is alive for a moment there.
    """
    of = blocks.of
    each = states / (2 + of.gradient_bytes + np.where(of.offload, 0, of.optimizer_bytes))
    kept = np.where(of.recompute > 0, 1 - again, 1.0)
    lacking = np.where(of.rounds(global_batch) == 1, of.gradient_bytes, 0) + 2 * (1 - kept)
    early, late = states - each * lacking, states - 2 * each
    at_end = late + transient > early + activations + loss
    return (
        np.where(at_end, late, early),
        np.where(at_end, 0.0, activations),
        np.where(at_end, transient, loss),
    )


def _layers(model: Transformer, of: Columns, *, first: bool) -> tuple[Any, Any]:
    """Layers of a rank, and how many of them have no experts."""
    pairs, index = np.unique(np.stack([of.pp, of.virtual]), axis=1, return_inverse=True)
    found = [stages(model, int(pp), int(virtual)) for pp, virtual in pairs.T]
    layers = np.array([each.first if first else each.last for each in found], dtype=float)
    dense = np.array([min(model.dense_layers, each.chunks[0]) for each in found], dtype=float)
    if not first:
        dense = np.where(pairs[0] == 1, dense, 0.0)
    index = index.reshape(-1)
    return layers[index], dense[index]


def _in_flight(of: Columns, rounds: Any, *, first: bool) -> Any:
    """Micro-batches whose activations a rank holds at most, counted in all of its layers.

    One forward, one backward; interleaved as in Narayanan et al. (2021).
    """
    behind = of.pp - 1 if first else np.zeros_like(of.pp)
    plain = np.minimum(rounds, behind + 1)
    parts = np.minimum(rounds * of.virtual, 2 * behind + (of.virtual - 1) * of.pp + 1)
    return np.where(of.virtual > 1, parts / of.virtual, plain)


def _states(of: Columns, parameters: Any, shards: Any) -> Any:
    """Bytes of parameters, gradients and the optimizer's state."""
    stage = of.stage
    weights = np.where(stage == 3, 0.0, 2.0)
    gradients = of.gradient_bytes / np.where(stage >= 2, shards, 1)
    optimizer = of.optimizer_bytes / np.where(stage >= 1, shards, 1)
    # in stage 3 the master weights are the parameters, and stay on the device
    kept = np.where(stage == 3, 4.0 / shards, 0.0)
    optimizer = np.where(of.offload, np.minimum(kept, optimizer), optimizer)
    return parameters * (weights + gradients + optimizer)


def _expert_shards(of: Columns) -> Any:
    """Ranks over which the states of an expert are sharded."""
    copies = of.dp * of.cp * of.tp / (of.ep * of.expert_tensor())
    return np.clip(copies, 1, of.shards)


def _loss(blocks: Blocks) -> Any:
    """Bytes of the logits and all that is made of them."""
    of, plain = blocks.of, LOGIT_BYTES_FUSED if blocks.model.fused else LOGIT_BYTES
    each = np.where((of.stage == 3) | blocks.autocast, LOGIT_BYTES_GATHERED, plain)
    return blocks.tokens * blocks.vocab * each / np.where(of.chunked_loss, CHUNKS, 1)
