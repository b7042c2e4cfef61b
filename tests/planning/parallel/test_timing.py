"""The time of a step: published runs, and what makes a step longer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlrover.accelerate import Cluster, Strategy, Transformer, predict, search
from dlrover.planning.parallel.accelerators import ACCELERATORS, TERMS

LLAMA_8B = Transformer(32, 4096, 14336, 32, 8, 128256)
LLAMA2_13B = Transformer(40, 5120, 13824, 40, 40, 32000)
LLAMA2_70B = Transformer(80, 8192, 28672, 64, 8, 32000)
MIXTRAL = Transformer(32, 4096, 14336, 32, 8, 32000, experts=8)
MPT_7B = Transformer(32, 4096, 16384, 32, 32, 50368, tied=True, gated=False)
MPT_30B = Transformer(48, 7168, 28672, 56, 56, 50368, tied=True, gated=False)

FSDP = Strategy(dp_shard=64, compile=True)
MPT = Strategy(dp_shard=8)

PUBLISHED = [  # tokens a second of each accelerator
    # torchtitan, commits 3faaa1a and 395a526: 64 A100 of 80 GB
    (LLAMA2_13B, replace(FSDP, micro_batch=2), "a100-80", 4096, 128, 2162),
    (LLAMA2_13B, replace(FSDP, micro_batch=2, recompute="selective"), "a100-80", 4096, 128, 1904),
    (LLAMA2_70B, replace(FSDP, micro_batch=2, recompute="full"), "a100-80", 4096, 128, 353),
    (LLAMA_8B, replace(FSDP, recompute="selective"), "a100-80", 8192, 64, 2973),
    # llm-foundry, scripts/train/benchmarking
    (MPT_7B, replace(MPT, micro_batch=6), "a100-80", 2048, 96, 4641),
    (MPT_30B, replace(MPT, micro_batch=3, recompute="full"), "a100-80", 2048, 504, 916),
    (MPT_7B, replace(MPT, micro_batch=6), "h100-80", 2048, 48, 10643),
    (MPT_30B, replace(MPT, micro_batch=3, recompute="full"), "h100-80", 2048, 504, 2002),
]


@pytest.mark.parametrize(
    ("model", "strategy", "accelerator", "sequence", "batch", "tokens"), PUBLISHED
)
def test_published_speeds(model, strategy, accelerator, sequence, batch, tokens):
    cluster = Cluster(accelerator, strategy.size // 8)
    found = predict(model, strategy, cluster, sequence=sequence, global_batch=batch)
    assert found.tokens_per_second == pytest.approx(
        tokens, rel=0.1 if accelerator.startswith("a100") else 0.3
    )
    assert found.step_low < found.step_seconds < found.step_high


def seconds(strategy, *, model=LLAMA_8B, nodes=0, batch=256, sequence=4096, kind="h100-80"):
    cluster = Cluster(kind, nodes or max(1, strategy.size // 8))
    return predict(model, strategy, cluster, sequence=sequence, global_batch=batch).step_seconds


LATENT = Transformer(
    4, 5120, 1536, 128, 128, 102400, experts=160, experts_per_token=6, shared_experts=2, head_dim=128, dense_layers=1,
    dense_ffn=12288, q_lora=1536, kv_lora=512, rope_dim=64, value_dim=128, fused=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "rounds", "measured"),
    [  # SimuMax, 4 layers of DeepSeek V2 on 8 B200
        (Strategy(dp_shard=8, zero=1, ep=8), 8, 0.6762),
        (Strategy(dp_shard=4, zero=1, ep=4, pp=2), 8, 0.4926),
        (Strategy(dp_shard=8, zero=1, ep=8), 32, 2.7213),
    ],
)
def test_published_times_of_experts_and_latent_attention(strategy, rounds, measured):
    found = seconds(strategy, model=LATENT, batch=rounds * strategy.dp, kind="b200")
    assert found == pytest.approx(measured, rel=0.12)


def test_experts_that_are_far_or_unevenly_asked_are_slower():
    near, far = Strategy(dp_shard=32, zero=1, ep=8), Strategy(dp_shard=32, zero=1, ep=32)
    one_more = replace(LATENT, dense_layers=0)
    assert seconds(near, model=LATENT) < seconds(far, model=LATENT)
    assert seconds(near, model=LATENT) < seconds(near, model=replace(LATENT, imbalance=2.0))
    # a layer without experts is as wide, but sends nothing
    assert seconds(near, model=LATENT) < seconds(near, model=one_more)


@pytest.mark.parametrize(("ranks", "bf16", "fp8"), [(8, 6667, 8532), (128, 6514, 8380)])
def test_products_in_fp8_are_faster(ranks, bf16, fp8):
    # torchtitan, docs/performance of 2024-12: tokens a second of each accelerator
    strategy = Strategy(dp_shard=ranks, micro_batch=2, recompute="selective", compile=True)
    slow, fast = (
        seconds(one, batch=2 * ranks, sequence=8192, kind="h100-96")
        for one in (strategy, replace(strategy, precision="fp8"))
    )
    assert slow / fast == pytest.approx(fp8 / bf16, rel=0.03)


def test_a_step_has_costs_that_do_not_grow_with_its_batch():
    strategy = Strategy(dp_replicate=16)
    assert 2 * seconds(strategy, batch=64) > 1.03 * seconds(strategy, batch=128)


@pytest.mark.parametrize(
    ("faster", "slower"),
    [
        (Strategy(dp_shard=8, tp=8), Strategy(dp_shard=4, tp=16)),
        (Strategy(dp_shard=8), Strategy(dp_shard=8, recompute="selective")),
        (Strategy(dp_shard=8, recompute="selective"), Strategy(dp_shard=8, recompute="full")),
        (
            Strategy(dp_shard=8, recompute="full", recompute_layers=8),
            Strategy(dp_shard=8, recompute="full", recompute_layers=24),
        ),
        (Strategy(dp_shard=8), Strategy(dp_shard=8, offload=True)),
        (Strategy(dp_shard=8, zero=2, micro_batch=4), Strategy(dp_shard=8, zero=2)),
        (Strategy(dp_shard=64, micro_batch=2), Strategy(dp_shard=64, cp=1, micro_batch=1)),
    ],
)
def test_what_makes_a_step_longer(faster, slower):
    model = replace(LLAMA_8B, kv_heads=32)
    assert seconds(faster, model=model) < seconds(slower, model=model)


def test_a_micro_batch_of_few_tokens_takes_what_a_host_needs_for_the_layers_and_the_output():
    tiny = Transformer(1, 64, 256, 1, 1, 256)

    def seconds(layers, batch):
        model = replace(tiny, layers=layers)
        found = predict(
            model, Strategy(), Cluster("h100-80", 1, 1), sequence=16, global_batch=batch
        )
        return found.step_seconds

    layer = (seconds(9, 100) - seconds(1, 100)) / 8
    without = seconds(1, 100) - layer - (seconds(1, 1) - (seconds(1, 2) - seconds(1, 1)))
    assert without / 100 == pytest.approx(layer / 100, rel=0.1)


def test_a_pipeline_idles_while_it_fills_and_drains():
    strategy = Strategy(pp=8)
    few, many = (seconds(strategy, batch=batch) / batch for batch in (8, 256))
    assert few == pytest.approx(many * 15 / 8, rel=0.1)


def test_interleaving_shortens_the_idle_time():
    plain = Strategy(pp=4, dp_shard=2)
    model = replace(LLAMA_8B, vocab=32000)
    assert seconds(replace(plain, virtual=4), batch=8, model=model) < seconds(
        plain, batch=8, model=model
    )


def test_the_offloaded_optimizer_takes_the_time_of_its_bytes():
    here, away = (
        seconds(Strategy(dp_shard=8, zero=1, offload=offload)) for offload in (False, True)
    )
    assert away - here > LLAMA_8B.parameters / 8 * 24 / ACCELERATORS["h100-80"].host


def test_ranks_of_one_node_share_its_network():
    # as many bytes of gradients on each rank, but one or four ranks of a group in each node
    near = Strategy(dp_replicate=32, tp=2)
    far = Strategy(dp_replicate=8, tp=8)
    small = replace(LLAMA_8B, layers=8, kv_heads=32)
    large = replace(small, layers=32)
    assert seconds(near, model=small, batch=32) < seconds(far, model=large, batch=32)


def test_gradients_between_nodes_take_longer_than_within_one():
    batch = 16
    within = seconds(Strategy(dp_replicate=8), batch=batch)
    between = seconds(Strategy(dp_replicate=16), batch=2 * batch)
    assert between > 1.05 * within


def test_more_experts_cost_little_time_where_their_ranks_hold_few():
    shared = seconds(Strategy(dp_shard=8, zero=1, ep=8), model=MIXTRAL)
    assert shared < seconds(Strategy(dp_shard=8, zero=1), model=MIXTRAL)


def test_tokens_take_longer_to_experts_on_other_nodes():
    wide = replace(MIXTRAL, experts=16)
    ranks = Strategy(dp_shard=16, zero=1)
    times = [
        seconds(replace(ranks, ep=ep), model=replace(wide, layers=4), batch=1024) for ep in (8, 16)
    ]
    assert times[0] < times[1]


def test_each_accelerator_has_all_coefficients_and_newer_ones_are_faster():
    assert all(len(each.coefficients) == len(TERMS) for each in ACCELERATORS.values())
    times = [seconds(Strategy(dp_shard=8), kind=kind) for kind in ("a100-80", "h100-80", "b200")]
    assert times == sorted(times, reverse=True)


def test_an_interleaved_schedule_needs_whole_rounds_and_a_full_pipeline_enough_micro_batches():
    odd = Strategy(pp=4, virtual=2, dp_shard=2)
    found = predict(LLAMA_8B, odd, Cluster(), sequence=4096, global_batch=12)
    assert (
        found.reason == "A rank has 6 micro-batches: with virtual above 1, pp (4) must divide them."
    )
    plans = search(LLAMA_8B, Cluster(), sequence=4096, global_batch=4, limit=100)
    assert all(4 // (one.dp * one.micro_batch) >= one.pp for one, _ in plans)
