"""The memory of published runs. Sources: each row; all are under Apache-2.0 or BSD licences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlrover.accelerate import Cluster, Strategy, Transformer, predict

LLAMA_8B = Transformer(32, 4096, 14336, 32, 8, 128256)
LLAMA2_7B = Transformer(32, 4096, 11008, 32, 32, 32000)
LLAMA_70B = Transformer(80, 8192, 28672, 64, 8, 128256)
NANO_1B = Transformer(16, 2048, 8192, 32, 32, 131072, tied=True)
NANO_3B = Transformer(28, 3072, 8192, 32, 32, 131072, tied=True)

SMALL = Transformer(24, 1024, 4096, 16, 16, 32000, tied=True, autocast=True)
LLAMA_1B = Transformer(16, 2048, 8192, 32, 8, 128256, tied=True, autocast=True)
LLAMA_3B = Transformer(28, 3072, 8192, 24, 8, 128256, tied=True, autocast=True)
ONE_H200 = Cluster("h200", 1, 1)

FSDP = Strategy(dp_shard=8, micro_batch=2, recompute="selective")
LONG = Strategy(recompute="full", compile=True)

TORCHTITAN = [  # docs/performance of torchtitan, 2024-12: H100 of 96 GB, GiB reserved
    (LLAMA_8B, FSDP, 8192, 16, 82.4),
    (LLAMA_8B, replace(FSDP, compile=True), 8192, 16, 77.0),
    (LLAMA_8B, replace(FSDP, dp_shard=128), 8192, 256, 67.0),
    (LLAMA_8B, replace(FSDP, dp_shard=128, compile=True), 8192, 256, 62.0),
    (LLAMA_8B, replace(LONG, dp_shard=8), 32768, 8, 83.9),
    (LLAMA_8B, replace(LONG, dp_shard=4, cp=2), 65536, 4, 84.2),
    (LLAMA_8B, replace(LONG, dp_shard=2, cp=4), 131072, 2, 84.0),
    (LLAMA_8B, replace(LONG, dp_shard=1, cp=8), 262144, 1, 84.5),
]
LLAMA2 = [  # torchtitan's pull request 165: parts of 95.04 GiB
    (Strategy(dp_shard=8, micro_batch=8, recompute="full"), 0.3264),
    (Strategy(dp_shard=8, micro_batch=8, recompute="selective"), 0.6251),
    (Strategy(dp_shard=8, micro_batch=8, compile=True), 0.9499),
]
LLAMA_70B_12 = replace(LLAMA_70B, layers=12, fused=True)
LATENT = Transformer(
    4, 5120, 1536, 128, 128, 102400, experts=160, experts_per_token=6, shared_experts=2, head_dim=128, dense_layers=1,
    dense_ffn=12288, q_lora=1536, kv_lora=512, rope_dim=64, value_dim=128, fused=True,
)  # fmt: skip
DEEPSEEK_V3 = replace(
    LATENT, hidden=7168, ffn=2048, vocab=129280, experts=256, experts_per_token=8, shared_experts=1, dense_ffn=18432,
)  # fmt: skip
SIMUMAX = [  # SimuMax, 8 x B200, 4 layers of DeepSeek V2 and V3, 12 of Llama 3 70B: tokens, GiB allocated, reserved
    (LLAMA_70B_12, Strategy(dp_shard=4, zero=1, pp=2), 4096, 66.55, 70.88),
    (LLAMA_70B_12, Strategy(dp_shard=4, zero=1, tp=2), 4096, 60.68, 62.53),
    (LLAMA_70B_12, Strategy(dp_shard=2, zero=1, tp=4), 4096, 39.07, 40.18),
    (LLAMA_70B_12, Strategy(zero=1, tp=8), 4096, 28.29, 29.12),
    (LLAMA_70B_12, Strategy(zero=1, tp=2, cp=4), 131072, 112.67, 121.4),
    (LATENT, Strategy(dp_shard=8, zero=1, ep=8), 4096, 45.63, 48.79),
    (LATENT, Strategy(dp_shard=4, zero=1, ep=4, pp=2), 4096, 44.7, 47.05),
    (DEEPSEEK_V3, Strategy(dp_shard=8, zero=1, ep=8), 4096, 104.3, 110.18),
    (DEEPSEEK_V3, Strategy(dp_shard=4, zero=1, ep=4, pp=2), 4096, 114.0, 118.61),
]
PLAYBOOK = [  # Ultra-Scale Playbook, nanotron on H100: nodes, GB, sequences of 4096, 256 a step
    (NANO_1B, Strategy(dp_shard=8, zero=0), 1, 36.7),
    (NANO_1B, Strategy(dp_shard=8, zero=0, micro_batch=2), 1, 50.2),
    (NANO_1B, Strategy(dp_shard=16, zero=1, micro_batch=2), 2, 35.0),
    (NANO_3B, Strategy(dp_shard=2, zero=1, pp=16, micro_batch=4), 4, 73.0),
    (NANO_3B, Strategy(dp_shard=32, zero=1, micro_batch=2), 4, 62.9),
]


@pytest.mark.parametrize(("model", "strategy", "sequence", "batch", "measured"), TORCHTITAN)
def test_torchtitans_runs_of_llama_8b_are_within_5_percent(
    model, strategy, sequence, batch, measured
):
    cluster = Cluster("h100-96", strategy.size // 8)
    found = predict(model, strategy, cluster, sequence=sequence, global_batch=batch)
    assert found.memory_gib == pytest.approx(measured, rel=0.05)
    assert found.memory_low < measured < found.memory_high
    assert found.fits


@pytest.mark.parametrize(("strategy", "part"), LLAMA2)
def test_llama2_7b_by_recomputation(strategy, part):
    found = predict(LLAMA2_7B, strategy, Cluster("h100-96"), sequence=2048, global_batch=64)
    assert found.memory_gib == pytest.approx(95.04 * part, rel=0.08)


@pytest.mark.parametrize(("model", "strategy", "sequence", "allocated", "reserved"), SIMUMAX)
def test_simumaxs_runs_are_within_3_percent(model, strategy, sequence, allocated, reserved):
    found = predict(
        model, strategy, Cluster("b200"), sequence=sequence, global_batch=4 * strategy.dp
    )
    assert found.active_gib == pytest.approx(allocated, rel=0.03)
    assert found.memory_gib == pytest.approx(reserved, rel=0.04)


@pytest.mark.parametrize(("model", "strategy", "nodes", "measured"), PLAYBOOK)
def test_runs_of_the_playbook(model, strategy, nodes, measured):
    found = predict(model, strategy, Cluster("h100-80", nodes), sequence=4096, global_batch=256)
    assert found.memory_gib == pytest.approx(measured, rel=0.15)


def gib(strategy: Strategy, model: Transformer = LLAMA_8B, batch: int = 256) -> float:
    return predict(model, strategy, Cluster(), sequence=8192, global_batch=batch).memory_gib


@pytest.mark.parametrize(
    ("model", "sequence", "micro_batch", "recompute", "allocated"),
    [  # PyTorch 2.11 on an H200: Hugging Face's Llama under autocast, GiB allocated (benchmarks/results/accelerator.json)
        (SMALL, 2048, 2, "none", 13.4),
        (SMALL, 2048, 16, "none", 67.3),
        (SMALL, 2048, 16, "selective", 41.1),
        (SMALL, 2048, 16, "full", 20.0),
        (SMALL, 8192, 8, "full", 35.1),
        (LLAMA_1B, 2048, 4, "none", 43.8),
        (LLAMA_1B, 2048, 4, "selective", 33.5),
        (LLAMA_1B, 8192, 2, "full", 40.2),
        (LLAMA_3B, 2048, 1, "none", 53.6),
        (LLAMA_3B, 2048, 1, "full", 49.4),  # most when the gradients are complete, not at the loss
    ],
)
def test_programs_under_autocast_are_within_3_percent(model, sequence, micro_batch, recompute, allocated):  # fmt: skip
    strategy = Strategy(micro_batch=micro_batch, recompute=recompute)
    found = predict(model, strategy, ONE_H200, sequence=sequence, global_batch=micro_batch)
    assert found.active_gib == pytest.approx(allocated, rel=0.03)
    assert sum(found.parts.values()) == pytest.approx(found.memory_gib)


def test_under_autocast_gradients_stay_between_micro_batches_and_shards_are_as_before():
    one = Strategy(micro_batch=1)
    once, twice = (
        predict(SMALL, one, ONE_H200, sequence=2048, global_batch=batch).active_gib
        for batch in (1, 2)
    )
    assert twice - once == pytest.approx(4 * SMALL.parameters / 2**30, rel=0.05)
    wide = Transformer(
        24, 2048, 8192, 16, 16, 32000, autocast=True
    )  # what a layer takes outweighs the loss
    chunked = Strategy(micro_batch=16, recompute="full", chunked_loss=True)
    once, twice = (
        predict(wide, chunked, ONE_H200, sequence=8192, global_batch=batch).active_gib
        for batch in (16, 32)
    )
    assert 0 <= twice - once <= 1.01 * 4 * wide.parameters / 2**30
    sharded, eight = Strategy(dp_shard=8), Cluster("h200")
    plain = replace(SMALL, autocast=False)
    found = [
        predict(model, sharded, eight, sequence=2048, global_batch=8) for model in (SMALL, plain)
    ]
    assert found[0] == found[1]


def test_replicas_and_unsharded_ranks_are_the_same():
    assert gib(Strategy(dp_replicate=8)) == gib(Strategy(dp_shard=8, zero=0))
    assert gib(Strategy(dp_replicate=8, zero=1)) == gib(Strategy(dp_replicate=8))


def test_parts_add_up_and_states_are_exact():
    strategy = Strategy(dp_shard=8, zero=1)
    found = predict(LLAMA_8B, strategy, Cluster(), sequence=8192, global_batch=256)
    assert sum(found.parts.values()) == pytest.approx(found.memory_gib)
    assert found.parts["states"] * 2**30 == pytest.approx(
        LLAMA_8B.parameters * (2 + 4 + 12 / 8), rel=1e-3
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Strategy(dp_shard=8), Strategy(dp_shard=8, recompute="selective")),
        (Strategy(dp_shard=8, recompute="selective"), Strategy(dp_shard=8, recompute="full")),
        (Strategy(dp_shard=8), Strategy(dp_shard=8, chunked_loss=True)),
        (Strategy(dp_shard=8), Strategy(dp_shard=8, compile=True)),
        (Strategy(dp_shard=8), Strategy(dp_shard=8, offload=True)),
        (Strategy(dp_shard=8), Strategy(dp_shard=8, optimizer_bytes=6)),
        (Strategy(dp_shard=8, zero=1), Strategy(dp_shard=8, zero=2)),
        (Strategy(dp_shard=8, zero=2), Strategy(dp_shard=8, zero=3)),
        (Strategy(dp_shard=8, zero=1), Strategy(dp_shard=8, zero=1, gradient_bytes=2)),
        (Strategy(tp=8, sequence_parallel=False), Strategy(tp=8)),
        (Strategy(dp_shard=8), Strategy(dp_shard=4, cp=2)),
        (Strategy(dp_shard=8, micro_batch=2), Strategy(dp_shard=8)),
    ],
)
def test_each_remedy_saves_memory(before, after):
    assert gib(after) < gib(before)


def test_interleaving_costs_memory_and_the_first_stage_has_most_micro_batches():
    plain = Strategy(dp_shard=2, zero=1, pp=4)
    assert gib(replace(plain, virtual=2)) > gib(plain)
    cluster = Cluster()
    found = predict(LLAMA_8B, plain, cluster, sequence=8192, global_batch=256)
    assert found.stage == 0
    wide = replace(LLAMA_8B, vocab=512_000)
    few = predict(wide, replace(plain, virtual=8), cluster, sequence=8192, global_batch=2)
    assert few.stage == 3  # with one micro-batch in flight the loss counts


def test_what_a_program_does_changes_its_memory():
    model = Transformer(8, 2048, 1024, 16, 16, 128256, experts=64, experts_per_token=8)
    strategy = Strategy(dp_shard=8, zero=1, ep=8)
    plain = gib(strategy, model)
    assert gib(strategy, replace(model, fused=True)) < plain
    assert gib(strategy, replace(model, imbalance=2.0)) > plain
    copied = gib(strategy, replace(model, copied_gradients=True))
    kept = model.parameters - model.layers * 56 * model.expert
    assert (copied - plain) * 2**30 == pytest.approx(4 * kept, rel=0.01)


def test_experts_are_shared_by_their_ranks():
    model = Transformer(16, 2048, 1024, 16, 16, 32000, experts=64, experts_per_token=8)
    states = [
        predict(
            model, Strategy(dp_shard=8, zero=1, ep=ep), Cluster(), sequence=4096, global_batch=64
        ).parts["states"]
        for ep in (1, 2, 8)
    ]
    assert states[0] > states[1] > states[2]
