"""The search, and the explanation of strategies that it does not take."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from dlrover.accelerate import Cluster, Strategy, Transformer, predict, search, why_not
from dlrover.errors import ConfigurationError
from dlrover.planning.parallel.search import RELUCTANCE, SIMPLER
from dlrover.planning.parallel.stages import stages

LLAMA_8B = Transformer(32, 4096, 14336, 32, 8, 128256)
LLAMA_70B = Transformer(80, 8192, 28672, 64, 8, 128256)
LLAMA_405B = Transformer(126, 16384, 53248, 128, 8, 128256)


@pytest.mark.slow
def test_the_search_returns_what_predict_says_the_fastest_first():
    cluster = Cluster("h100-80", 8)
    found = search(LLAMA_70B, cluster, sequence=8192, global_batch=256)
    assert len(found) == 10
    assert all(strategy.size == 64 for strategy, _ in found)
    for strategy, predicted in found:
        assert predict(LLAMA_70B, strategy, cluster, sequence=8192, global_batch=256) == predicted
        assert predicted.fits
    kinds = [sum(degree > 1 for degree in (s.tp, s.pp, s.cp, s.ep)) for s, _ in found]
    other = [s.offload or s.optimizer_bytes < 12 for s, _ in found]
    paid = [
        p.step_seconds * SIMPLER**kind * (RELUCTANCE if changed else 1)
        for (_, p), kind, changed in zip(found, kinds, other, strict=True)
    ]
    assert paid == pytest.approx(sorted(paid))
    again = search(LLAMA_70B, cluster, sequence=8192, global_batch=256, limit=3)
    assert again == found[:3]


def test_each_entry_has_other_degrees():
    found = search(LLAMA_8B, Cluster(), sequence=8192, global_batch=128)
    degrees = [(one.tp, one.pp, one.cp, one.ep) for one, _ in found]
    assert len(set(degrees)) == len(degrees)


@pytest.mark.slow
def test_the_search_knows_experts_and_long_sequences():
    model = Transformer(32, 4096, 14336, 32, 8, 32000, experts=8)
    found = search(model, Cluster("h100-80", 8), sequence=4096, global_batch=256)
    assert any(one.ep > 1 for one, _ in found)
    long = search(LLAMA_8B, Cluster(), sequence=131072, global_batch=8)
    assert all(one.cp * one.tp > 1 for one, _ in long)


def test_the_search_in_fp8_needs_an_accelerator_that_has_it():
    job = {"sequence": 4096, "global_batch": 64}
    [(strategy, faster)] = search(LLAMA_8B, Cluster(), limit=1, precision="fp8", **job)
    [(_, plain)] = search(LLAMA_8B, Cluster(), limit=1, **job)
    assert strategy.precision == "fp8"
    assert faster.step_seconds < plain.step_seconds
    found = why_not(LLAMA_8B, Strategy(dp_shard=8, precision="fp8"), Cluster("a100-80"), **job)
    assert found.reason == "precision is fp8: a100-80 has no products in fp8."
    assert found.strategy.precision == "bf16"
    assert search(LLAMA_8B, Cluster("a100-80"), precision="fp8", **job) == []


def test_nothing_fits_a_small_cluster():
    assert search(LLAMA_405B, Cluster("a100-40"), sequence=4096, global_batch=64) == []


@pytest.mark.parametrize(
    ("strategy", "sentence"),
    [
        (Strategy(dp_shard=4), "is 4 ranks: the cluster has 8 accelerators"),
        (Strategy(dp_shard=8, virtual=2), "virtual is 2: that needs pp of 2"),
        (Strategy(dp_shard=8, ep=2), "ep is 2: it must divide the 0 experts"),
        (Strategy(dp_shard=8, micro_batch=32), "dp x micro_batch is 256"),
        (Strategy(pp=8, virtual=8), "pp x virtual is 64 parts: the model has 32 layers"),
        (Strategy(dp_shard=8, micro_batch=8), "stage 0 needs .* GiB, up to .*: .* activations"),
    ],
)
def test_the_first_rule_broken_is_named_with_its_numbers(strategy, sentence):
    found = why_not(LLAMA_8B, strategy, Cluster(), sequence=8192, global_batch=128)
    assert not found.prediction.fits
    assert found.reason == found.prediction.reason
    assert re.search(sentence, found.reason)


def test_heads_limit_tensor_parallelism():
    strategy = Strategy(dp_shard=4, tp=16)
    found = why_not(LLAMA_8B, strategy, Cluster(nodes=8), sequence=8192, global_batch=128)
    assert found.reason == "tp is 16: it must divide the 8 heads of keys and values."
    assert found.strategy is not None
    assert found.strategy.tp < 16


def test_the_mend_fits_and_says_what_it_costs():
    cluster = Cluster("h100-80", 8)
    strategy = Strategy(dp_shard=8, tp=8, micro_batch=4)
    found = why_not(LLAMA_70B, strategy, cluster, sequence=8192, global_batch=256)
    assert "recompute none -> selective" in found.mend
    assert "% speed" in str(found)
    assert found.strategy == replace(strategy, recompute="selective")
    mended = predict(LLAMA_70B, found.strategy, cluster, sequence=8192, global_batch=256)
    assert mended.fits


def test_only_as_many_layers_are_recomputed_as_memory_needs():
    found = search(LLAMA_70B, Cluster("h100-80", 8), sequence=8192, global_batch=256, limit=30)
    some = [one for one, _ in found if one.recompute_layers]
    assert some
    for one in some:
        less = replace(one, recompute_layers=one.recompute_layers - 1)
        if not less.recompute_layers:
            less = replace(one, recompute="none")
        fewer = predict(LLAMA_70B, less, Cluster("h100-80", 8), sequence=8192, global_batch=256)
        assert not fewer.fits
        assert fewer.step_seconds < dict(found)[one].step_seconds


@pytest.mark.slow
def test_llama_3s_plans_are_among_the_first_five():
    # arXiv 2407.21783, table 4: tp 8, pp 16 on 16,384 accelerators; with cp 16 for long sequences
    cluster = Cluster("h100-80", 2048)
    short = search(LLAMA_405B, cluster, sequence=8192, global_batch=2048, limit=5)
    assert (8, 16, 1) in [(one.tp, one.pp, one.cp) for one, _ in short]
    long = search(LLAMA_405B, cluster, sequence=131072, global_batch=128, limit=5)
    assert (8, 16, 16) in [(one.tp, one.pp, one.cp) for one, _ in long]


def test_a_strategy_that_fits_is_compared_with_the_best():
    cluster = Cluster()
    slow = Strategy(dp_shard=8, recompute="full")
    found = why_not(LLAMA_8B, slow, cluster, sequence=8192, global_batch=128)
    assert "% faster" in found.reason
    best = search(LLAMA_8B, cluster, sequence=8192, global_batch=128, limit=1)[0][0]
    assert found.strategy == best
    assert "no strategy" in str(why_not(LLAMA_8B, best, cluster, sequence=8192, global_batch=128))


def test_wrong_numbers_are_refused():
    with pytest.raises(ConfigurationError, match="accelerator is 'h101': accepted are a100-40"):
        predict(LLAMA_8B, Strategy(), Cluster("h101", 1, 1), sequence=1, global_batch=1)
    with pytest.raises(ConfigurationError, match="sequence is 0"):
        predict(LLAMA_8B, Strategy(), Cluster(), sequence=0, global_batch=1)
    with pytest.raises(ConfigurationError, match="limit is 0"):
        search(LLAMA_8B, Cluster(), sequence=1024, global_batch=8, limit=0)


@pytest.mark.parametrize("pp", [1, 2, 3, 5, 7, 16, 31, 32])
@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_stages_have_all_layers(pp, virtual):
    if pp * virtual <= 32:
        found = stages(LLAMA_8B, pp, virtual)
        assert sum(found.chunks) == 32
        assert len(found.chunks) == pp * virtual
        assert min(found.chunks) >= (0 if pp > 1 else 1)


def test_a_large_output_layer_shortens_the_last_stage():
    small = Transformer(16, 2048, 8192, 32, 32, 131072, tied=True)
    assert stages(small, 4, 1).chunks == (5, 5, 5, 1)  # the output layer costs as much as 4 layers
    assert stages(LLAMA_70B, 4, 1).chunks == (20, 20, 20, 20)
    assert stages(LLAMA_405B, 16, 1).chunks == (*(8,) * 11, 7, 8, 8, 8, 7)


def test_a_strategy_of_absurd_size_is_refused_at_once():
    strategy = Strategy(pp=8, virtual=1_000_000)
    found = why_not(LLAMA_8B, strategy, Cluster(), sequence=4096, global_batch=64)
    assert found.reason.startswith("pp x virtual is 8000000 parts: the model has")
    assert not predict(
        LLAMA_8B, Strategy(pp=1 << 30), Cluster(), sequence=4096, global_batch=64
    ).fits
    parts = stages(LLAMA_8B, 100, 3)
    assert (parts.first, parts.last, parts.most, sum(parts.chunks)) == (1, 0, 1, LLAMA_8B.layers)


def test_a_cluster_of_prime_size_has_its_own_divisors_only():
    assert not search(LLAMA_8B, Cluster(nodes=999_999_937), sequence=4096, global_batch=64)


@pytest.mark.parametrize("name", ["sequence", "global_batch"])
def test_sizes_whose_products_overflow_are_refused(name):
    job = {"sequence": 4096, "global_batch": 64, name: 10**18}
    with pytest.raises(ConfigurationError, match=f"{name} is 1000000000000000000, not a positive integer, at most"):  # fmt: skip
        search(LLAMA_8B, Cluster(), **job)
