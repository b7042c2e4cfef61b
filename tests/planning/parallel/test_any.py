"""Any strategy of any model has a prediction, whether it obeys the rules or not."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings, strategies as st

from dlrover.accelerate import Cluster, Strategy, Transformer, predict

FLAG = st.booleans()
SHAPES = st.builds(
    Transformer,
    layers=st.sampled_from([1, 2, 7, 80]),
    hidden=st.sampled_from([1, 64, 8192]),
    ffn=st.sampled_from([1, 100, 28672]),
    heads=st.sampled_from([8, 24]),
    kv_heads=st.sampled_from([1, 8]),
    vocab=st.sampled_from([1, 50257]),
    tied=FLAG,
    gated=FLAG,
    experts=st.sampled_from([0, 4, 160]),
    shared_experts=st.integers(0, 1),
    dense_layers=st.integers(0, 1),
    kept=st.sampled_from([0.0, 1e5]),
    kv_lora=st.sampled_from([16, 512]),
    q_lora=st.sampled_from([0, 64]),
    rope_dim=st.sampled_from([0, 64]),
    value_dim=st.sampled_from([0, 100]),
    imbalance=st.sampled_from([1.0, 3.5]),
    fused=FLAG,
    copied_gradients=FLAG,
)
STRATEGIES = st.builds(
    Strategy,
    dp_replicate=st.integers(1, 3),
    dp_shard=st.sampled_from([1, 4, 7]),
    zero=st.integers(0, 3),
    tp=st.sampled_from([1, 2, 3, 16]),
    pp=st.sampled_from([1, 2, 5, 64]),
    virtual=st.integers(1, 3),
    cp=st.integers(1, 3),
    ep=st.sampled_from([1, 2, 1000]),
    micro_batch=st.sampled_from([1, 3, 64]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    recompute_layers=st.sampled_from([0, 1, 99]),
    sequence_parallel=FLAG,
    offload=FLAG,
    optimizer_bytes=st.sampled_from([0, 6, 12]),
    gradient_bytes=st.sampled_from([0, 2, 4]),
    chunked_loss=FLAG,
    compile=FLAG,
    precision=st.sampled_from(["bf16", "fp8"]),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    SHAPES,
    STRATEGIES,
    st.builds(Cluster, st.just("h100-80"), st.integers(1, 9), st.sampled_from([1, 8, 72])),
    st.sampled_from([1, 7, 4096]),
    st.sampled_from([1, 1000]),
)
def test_every_prediction_has_numbers(shape, strategy, cluster, sequence, batch):
    found = predict(shape, strategy, cluster, sequence=sequence, global_batch=batch)
    assert all(part >= 0 for part in found.parts.values())
    assert 0 < found.memory_low < found.memory_gib < found.memory_high < math.inf
    assert 0 < found.step_low < found.step_seconds < found.step_high < math.inf
    assert found.fits == (not found.reason)
