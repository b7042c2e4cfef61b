"""Time of a step. Needs numpy.

A step's time is a sum of terms, each an ideal time (operations at the data sheet's rate, bytes at a link's) times a
coefficient of the accelerator. Within a layer, the device works while the host launches the next operations and while
the parameters of the next layer are gathered: the slowest of the three counts. The pipeline's idle time is that of the
real schedule: one forward, one backward, or interleaved (Narayanan et al., 2021).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dlrover.planning.parallel.accelerators import TERMS, AcceleratorModel, accelerator
from dlrover.planning.parallel.columns import Columns, RankGroup
from dlrover.planning.parallel.memory import Blocks
from dlrover.planning.parallel.records import RECOMPUTE, Cluster, Transformer
from dlrover.planning.parallel.stages import stages

LAUNCH = 1e-3
"""Seconds that a host takes to launch one layer's forward and backward pass, times the coefficient ``launch``."""
LATENCY = 1e-4
"""Seconds that one collective takes at least, times the coefficient ``collective``."""
STAGGER = 1e-4
"""Seconds of a collective for each rank in a pipeline, times the coefficient ``stagger``.

Megatron-LM's runs have hardly any such time. One version of nanotron has, with a pipeline or without: its runs call for a calibration.
"""
FP8_BYTES, FP8_BYTES_FUSED = 6, 2
"""Bytes moved to turn an element into fp8: read in bf16 for its scale and again to convert it, and written in both layouts.

In compiled and fused programs, the kernel that makes the element writes it in fp8.
"""
SMALL = 2.5e9
"""Operations of a matrix product at which an accelerator reaches half of its rate."""
EXPOSED = 0.3
"""Part of the work that runs beside a layer's longest which lengthens the layer."""
HOP = 1e-5
"""Seconds of a ring's step from node to node."""
STEP = 1e-2
"""Seconds of a step that no other term explains, times the coefficient ``step``."""

_INDEX = {name: index for index, name in enumerate(TERMS)}


@dataclass(frozen=True)
class Timed:
    """What is known of the time of some strategies."""

    design: Any
    """Ideal seconds of each term, one row per strategy."""
    coefficients: Any

    @property
    def seconds(self) -> Any:
        """Seconds of a step."""
        return _sum(self.design, self.coefficients)


def timed(
    model: Transformer,
    of: Columns,
    cluster: Cluster,
    sequence: int,
    global_batch: int,
    coefficients: Any = None,
) -> Timed:
    """Return the time of each strategy, with the cluster's coefficients unless others are given."""
    device = accelerator(cluster.accelerator)
    if coefficients is None:
        coefficients = cluster.coefficients or device.coefficients
    weights = np.asarray(coefficients, dtype=float)
    work = Work(Blocks(model, of, sequence), cluster, device)
    rounds = of.rounds(global_batch)
    last, most = _layers(model, of)
    layer, head = _average_layer(work, weights), work.head()
    if np.any(of.recompute_layers):
        plain = replace(of, recompute=np.zeros_like(of.recompute))
        without = _average_layer(replace(work, blocks=replace(work.blocks, of=plain)), weights)
        again = of.recomputed(most)[:, None]
        layer = again * layer + (1 - again) * without
    seconds_layer, seconds_head = _sum(layer, weights), _sum(head, weights)
    ending = last * seconds_layer + seconds_head > most * seconds_layer
    # the slowest stage sets the pace; the others add to the time that it takes to fill and to drain
    slow = (
        np.where(ending, last, most)[:, None] * layer + np.where(ending, 1.0, 0.0)[:, None] * head
    )
    total = model.layers * layer + head
    idle = (total - slow) / of.virtual[:, None]
    design = rounds[:, None] * slow + np.maximum(idle, 0.0)
    design += ((rounds + of.pp - 1) * of.virtual)[:, None] * work.between_stages()
    design += work.once(most)
    return Timed(design, weights)


@dataclass(frozen=True)
class Work:
    """Ideal seconds of the parts of a step, as rows of terms."""

    blocks: Blocks
    cluster: Cluster
    device: AcceleratorModel
    experts: bool = False
    """True for a layer with experts."""

    def zeros(self) -> Any:
        """A row of no time for each strategy."""
        return np.zeros((len(self.blocks.of), len(TERMS)))

    @property
    def passes(self) -> Any:
        """Forward passes that a layer's products equal: the backward pass takes two, and what is computed again."""
        model, of = self.blocks.model, self.blocks.of
        queries, keys = model.heads * model.width, model.kv_heads * model.width
        ffn = model.dense_ffn if model.experts and not self.experts else model.ffn
        ffn *= model.experts_per_token + model.shared_experts if self.experts else 1
        attention = model.projections[0] if model.kv_lora else model.hidden * (queries + keys)
        again = attention + model.hidden * (ffn if model.gated else 0)
        share = again / (model.attention + (3 if model.gated else 2) * model.hidden * ffn)
        return np.select([of.recompute == 0, of.recompute == 1], [3.0, 3.0 + share], 4.0)

    def operands(self) -> Any:
        """Elements that a layer's products take for one micro-batch: inputs, gradients of outputs, and weights."""
        blocks, model, of = self.blocks, self.blocks.model, self.blocks.of
        per = model.experts_per_token + model.shared_experts if self.experts else 1
        width = model.dense_ffn if model.experts and not self.experts else model.ffn
        ffn = (4 if model.gated else 3) * width * per / of.tp
        tokens = blocks.tokens * (4 * model.hidden + 2 * sum(blocks.heads) + ffn)
        return tokens + blocks.attention + (blocks.experts if self.experts else blocks.dense)

    def device_time(self) -> Any:
        """Computation and communication of a layer for one micro-batch."""
        blocks, model, of, device = self.blocks, self.blocks.model, self.blocks.of, self.device
        tokens, row = blocks.tokens, self.zeros()
        products = _products(blocks, experts=self.experts)
        rate = np.where(of.fp8, device.fp8 or device.flops, device.flops)
        row[:, _INDEX["matmul"]] = self.passes * products / rate
        queries, keys, values, outputs = blocks.heads
        # half of the scores are masked; the backward pass computes them again
        scores = (queries + outputs) * tokens * blocks.sequence
        attention = np.where(of.recompute == RECOMPUTE.index("full"), 4.5, 3.5) * scores
        row[:, _INDEX["attention"]] = attention / device.flops
        again = np.where(of.recompute > 0, 4.0, 3.0)
        touched = again * tokens * blocks.kept(experts=self.experts)
        if self.experts:
            # with few tokens for each expert, reading its matrices takes as long as the products
            touched += (4 + 2 * of.gradient_bytes) * blocks.experts
        each = np.where(of.compile | model.fused, FP8_BYTES_FUSED, FP8_BYTES)
        touched += np.where(of.fp8, each * self.operands(), 0.0)
        row[:, _INDEX["memory"]] = touched / device.bandwidth
        tensor = RankGroup.of(of.tp, np.ones_like(of.tp), self.cluster)
        # gathered and scattered around attention and the feed-forward layer, forward and backward
        moved = _calls(of) * 2 * model.hidden * tokens
        self._collective(row, tensor, moved, near="tensor", far="tensor_between")
        ring = RankGroup.of(of.cp, of.tp, self.cluster)
        # every other rank's keys and values, and their gradients
        moved = of.cp * tokens * (keys + values) * 6
        self._collective(row, ring, moved, near="tensor", far="tensor_between")
        if self.experts:
            copies = model.experts_per_token * tokens * model.hidden / of.tp
            spread = RankGroup.of(of.ep, of.expert_tensor(), self.cluster)
            # there and back, forward and backward; what goes to other nodes takes its own rank's link
            moved, far = 8 * copies * blocks.load, 1 - spread.near / spread.size
            row[:, _INDEX["tensor"]] += (spread.near - 1) / spread.size * moved / device.intra
            row[:, _INDEX["tensor_between"]] += far * moved / device.inter
        return row

    def _collective(
        self, row: Any, group: RankGroup, moved: Any, *, near: str, far: str, calls: Any = 1
    ) -> None:
        """Add the time in which each rank of a group receives ``moved`` bytes less its own part."""
        part = moved * (group.size - 1) / group.size
        speed = np.minimum(self.device.intra, self.device.inter * group.near)
        row[:, _INDEX[near]] += np.where(group.between, 0.0, part / self.device.intra)
        # a ring passes each node once, however small the message
        ring = HOP * calls * group.size / group.near
        row[:, _INDEX[far]] += np.where(group.between, part / speed + ring, 0.0)

    def host_time(self) -> Any:
        """What a host takes for one layer and micro-batch."""
        of, row = self.blocks.of, self.zeros()
        row[:, _INDEX["launch"]] = self.passes / 3 * LAUNCH
        calls = _calls(of)
        tensor = RankGroup.of(of.tp, np.ones_like(of.tp), self.cluster)
        waited = np.where(of.tp > 1, calls * of.tp * LATENCY, 0.0)
        row[:, _INDEX["collective"]] = np.where(tensor.between, 0.0, waited)
        row[:, _INDEX["collective_between"]] = np.where(tensor.between, waited, 0.0)
        waits = of.pp > 1
        row[:, _INDEX["stagger"]] = np.where(waits, calls * of.tp * STAGGER, 0.0)
        return row

    def gather_time(self) -> Any:
        """Communication of a layer for one micro-batch: gradients from ZeRO's stage 2 on, parameters in stage 3."""
        blocks, of, row = self.blocks, self.blocks.of, self.zeros()
        layer = blocks.attention + (blocks.experts if self.experts else blocks.dense)
        group = RankGroup.of(of.shards, of.tp, self.cluster)
        each = np.select(
            [of.stage == 3, of.stage == 2], [4.0 + of.gradient_bytes, of.gradient_bytes]
        )
        moved = each * layer
        calls = np.select([of.stage == 3, of.stage == 2], [3, 1])
        self._collective(row, group, moved, near="data", far="data_between", calls=calls)
        return row

    def head(self) -> Any:
        """Output layer and loss for one micro-batch, which a host launches as it launches a layer."""
        blocks, row = self.blocks, self.zeros()
        logits = blocks.tokens * blocks.vocab
        row[:, _INDEX["matmul"]] = (
            3 * _effective(2 * logits * blocks.model.hidden) / self.device.flops
        )
        row[:, _INDEX["memory"]] = 30 * logits / self.device.bandwidth
        row[:, _INDEX["launch"]] = LAUNCH
        return row

    def between_stages(self) -> Any:
        """What a pipeline's stages exchange for one micro-batch."""
        blocks, of, row = self.blocks, self.blocks.of, self.zeros()
        moved = 4 * blocks.tokens * blocks.model.hidden / of.tp
        within = of.tp * of.cp * of.dp * of.pp <= self.cluster.per_node
        speed = np.where(within, self.device.intra, self.device.inter)
        row[:, _INDEX["pipeline"]] = np.where(of.pp > 1, moved / speed + 2 * LATENCY, 0.0)
        return row

    def once(self, most: Any) -> Any:
        """What a step takes once: gradients' reduction, the optimizer, and the rest."""
        blocks, of, row = self.blocks, self.blocks.of, self.zeros()
        model = blocks.model
        table = blocks.vocab * model.hidden * np.where((of.pp > 1) | model.tied, 1, 2)
        experts = blocks.experts if model.experts else blocks.dense
        here = most * (blocks.attention + experts) + table
        stage, shards = of.stage, of.shards
        each = [2 * of.gradient_bytes, of.gradient_bytes + 2, np.full(len(of), 2)]
        moved = here * np.select([stage == 0, stage == 1, stage == 2], each)
        group = RankGroup.of(of.dp * of.cp, of.tp, self.cluster)
        self._collective(row, group, moved, near="data", far="data_between")
        scattered = np.where((stage == 1) | (stage == 2), row[:, _INDEX["data_between"]], 0.0)
        row[:, _INDEX["scatter_between"]] = scattered
        row[:, _INDEX["data_between"]] -= scattered
        copies = RankGroup.of(of.dp_replicate, of.dp_shard * of.cp * of.tp, self.cluster)
        between = np.where(stage == 3, 2 * here * of.gradient_bytes / shards, 0.0)
        self._collective(row, copies, between, near="data", far="data_between")
        state = 2 * of.optimizer_bytes + of.gradient_bytes + 2
        updated = here * state / np.where(stage > 0, shards, 1)
        # the host computes it, and both directions share its memory
        speed = np.where(of.offload, self.device.host / 2, self.device.bandwidth)
        row[:, _INDEX["optimizer"]] = updated / speed
        row[:, _INDEX["step"]] = STEP
        return row


def _calls(of: Columns) -> Any:
    """Collectives of a layer around attention and the feed-forward layer, forward and backward."""
    return np.where(of.recompute == RECOMPUTE.index("full"), 12.0, 8.0)


def _average_layer(work: Work, weights: Any) -> Any:
    """The row of a layer, on average over those with experts and those without."""
    model = work.blocks.model
    if not model.experts:
        return _layer(work, weights)
    part = model.dense_layers / model.layers
    found = (1 - part) * _layer(replace(work, experts=True), weights)
    return found + part * _layer(work, weights) if part else found


def _layer(work: Work, weights: Any) -> Any:
    """One layer's row: of device, host and gathering, the slowest, and a part of the others."""
    rows = np.stack([work.device_time(), work.host_time(), work.gather_time()])
    slowest = np.argmax(_sum(rows, weights), axis=0)[None, :, None]
    longest = np.take_along_axis(rows, slowest, axis=0)[0]
    return (1 - EXPOSED) * longest + EXPOSED * np.sum(rows, axis=0)


def _sum(rows: Any, weights: Any) -> Any:
    """Weighted sums of rows, rounded alike however many rows there are."""
    return np.sum(rows * weights, axis=-1)


def _products(blocks: Blocks, *, experts: bool) -> Any:
    """Operations of a layer's matrix products, forward, lengthened where they are too small for the accelerator."""
    model, of, tokens = blocks.model, blocks.of, blocks.tokens
    hidden, (queries, keys, values, outputs) = model.hidden, blocks.heads
    total = _effective(2 * tokens * hidden * outputs)
    if model.kv_lora:
        total = total + _effective(2 * tokens * hidden * model.latent)
        total = total + 2 * _effective(tokens * model.projections[0] / of.tp)
    else:
        total = total + _effective(2 * tokens * hidden * (queries + keys + values))
    each = 3 if model.gated else 2
    if experts:
        # an expert's product has the tokens that were sent to it
        here = np.maximum(model.experts / of.ep, 1)
        routed = 2 * tokens * model.experts_per_token * model.expert / of.tp * blocks.load
        total = total + here * _effective(routed / here)
        return total + _effective(2 * tokens * model.shared_experts * model.expert / of.tp)
    matrix = 2 * tokens * blocks.dense / each
    return total + _effective((each - 1) * matrix) + _effective(matrix)


def _effective(operations: Any) -> Any:
    """Operations at the full rate that take as long as a product of ``operations``."""
    return operations + np.where(operations > 0, SMALL, 0.0)


def _layers(model: Transformer, of: Columns) -> tuple[Any, Any]:
    """Layers of the last rank, and of the one with the most."""
    pairs, index = np.unique(np.stack([of.pp, of.virtual]), axis=1, return_inverse=True)
    found = [stages(model, int(pp), int(virtual)) for pp, virtual in pairs.T]
    table = np.array([(each.last, each.most) for each in found], dtype=float)
    last, most = table[index.reshape(-1)].T
    return last, most
