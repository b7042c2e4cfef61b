"""The losses of 10 steps under each strategy equal those of a plain loop in one process.

So do the gradients' norms over all ranks. Parameters are really divided: `test_divided.py`. With the models of
Transformers: ``scripts/test-engines``, all combinations with ``-m heavy``.
"""

import pytest

from tests.accelerate.training import HUGGING_FACE, case, check

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(300)]

ON_TWO = [
    {"dp_replicate": 2},
    {"dp_shard": 2, "recompute": "selective"},
    {"dp_shard": 2, "zero": 2, "micro_batch": 3},
    {"dp_shard": 2, "offload": True},
    {"tp": 2, "sequence_parallel": False},
    {"tp": 2, "recompute": "selective"},
    {"pp": 2, "micro_batch": 2},
    {"pp": 2, "virtual": 2, "micro_batch": 2, "recompute": "full"},
    {"pp": 2, "micro_batch": 8, "schedule": "gpipe"},
    {"cp": 2, "recompute": "full"},
    {"cp": 2, "context": "ulysses", "zero": 0},
]
ON_FOUR = [
    {"dp_replicate": 2, "dp_shard": 2},
    {"dp_shard": 2, "tp": 2},
    {"dp_replicate": 2, "tp": 2, "sequence_parallel": False},
    {"dp_shard": 2, "cp": 2},
    {"dp_replicate": 2, "cp": 2, "zero": 0, "context": "ulysses"},
    {"dp_shard": 2, "pp": 2, "zero": 2, "micro_batch": 1},
    {"dp_replicate": 2, "pp": 2, "micro_batch": 2},
    {"tp": 2, "cp": 2, "recompute": "full"},
    {"tp": 2, "pp": 2, "micro_batch": 2},
    {"cp": 2, "pp": 2, "micro_batch": 2},
    {"pp": 4, "micro_batch": 1},
    {"tp": 2, "cp": 2, "context": "ulysses", "recompute": "selective"},
]
EXPERTS_ON_TWO = [
    {"dp_shard": 2, "ep": 2},
    {"dp_replicate": 2, "ep": 2, "recompute": "full"},
    {"cp": 2, "ep": 2, "recompute": "selective"},
    {"tp": 2, "ep": 2},
]
EXPERTS_ON_FOUR = [
    {"dp_shard": 4, "ep": 2},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    {"dp_shard": 2, "tp": 2, "ep": 2},
    {"dp_shard": 2, "tp": 2, "ep": 4, "sequence_parallel": False},
    {"dp_shard": 2, "pp": 2, "ep": 2, "zero": 2, "micro_batch": 2},
    {"cp": 2, "tp": 2, "ep": 2},
]


def test_on_two_ranks(forks):
    check(
        forks, 2,
        *[case("plain", fields) for fields in (*ON_TWO[:4], *ON_TWO[5:8], *ON_TWO[9:])],
        case("moe", {"tp": 2, "ep": 2, "sequence_parallel": False}),
        case("moe", {"cp": 2, "ep": 2, "recompute": "selective"}),
        # sizes that the ranks do not divide
        case("plain", {"tp": 2}, sequence=15),
        case("plain", {"cp": 2}, sequence=13),
        case("plain", {"dp_replicate": 2, "micro_batch": 2, "recompute": "full"}, batch=7),
        case("plain", {"dp_shard": 2}, batch=1),
        case("plain", {"pp": 2, "micro_batch": 3}, batch=7),
        # what all samples share is in each micro-batch
        case("positioned", {"pp": 2, "micro_batch": 2}),
        # a list of methods, another optimizer, other types
        case("plain", ["fsdp", ["checkpoint", ["Block"]]], optimizer="adamw"),
        case("plain", {"dp_shard": 2, "precision": "bf16", "recompute": "full"}, half=True),
        case("plain", {"pp": 2, "precision": "fp16", "micro_batch": 4}, half=True),
    )  # fmt: skip


@pytest.mark.heavy
def test_on_four_ranks(forks):
    check(
        forks, 4,
        *[case("plain", fields) for fields in (ON_FOUR[1], ON_FOUR[4], ON_FOUR[8])],
        *[case("moe", fields) for fields in EXPERTS_ON_FOUR[3:5]],
    )  # fmt: skip


def test_on_four_ranks_with_data_of_different_sizes(forks):
    """One rank has a new size where those that it shares parameters with have an old one."""
    check(forks, 4, case("plain", {"pp": 2, "dp_shard": 2, "micro_batch": 2}, varied=True))


def test_on_three_ranks(forks):
    """Sizes that are nobody's divisors."""
    check(
        forks, 3,
        case("plain", {"dp_shard": 3}),
        case("plain", {"pp": 3, "micro_batch": 3}, batch=8),
        case("plain", {"cp": 3}),
    )  # fmt: skip


@pytest.mark.skipif(not HUGGING_FACE, reason="needs transformers")
def test_models_of_transformers(forks):
    check(
        forks, 2,
        *[case("llama", fields) for fields in ({"tp": 2}, {"cp": 2}, {"pp": 2, "micro_batch": 2})],
        *[case("gpt2", fields) for fields in ({"tp": 2}, {"cp": 2}, {"pp": 2, "micro_batch": 2})],
        *[case("mixtral", fields) for fields in ({"tp": 2}, {"dp_shard": 2, "ep": 2})],
    )  # fmt: skip


@pytest.mark.heavy
@pytest.mark.parametrize("model", ["plain", "moe", "llama", "gpt2", "mixtral"])
def test_each_mode_and_each_pair(forks, model):
    if model in ("llama", "gpt2", "mixtral") and not HUGGING_FACE:
        pytest.skip("needs transformers")
    experts = model in ("moe", "mixtral")
    for ranks, strategies in (
        (2, ON_TWO + EXPERTS_ON_TWO * experts),
        (4, ON_FOUR + EXPERTS_ON_FOUR * experts),
    ):
        check(
            forks, ranks,
            *[case(model, fields) for fields in strategies],
            *[case(model, fields, optimizer="adamw", sequence=15) for fields in strategies if "pp" not in fields],
            *[case(model, {**fields, "precision": half}, half=True) for fields in strategies[::3] for half in ("bf16", "fp16")],
        )  # fmt: skip


@pytest.mark.heavy
def test_compiled(forks):
    check(
        forks, 2,
        case("plain", {"dp_shard": 2, "compile": True}),
        case("plain", {"tp": 2, "compile": True, "recompute": "selective"}),
        case("plain", {"cp": 2, "compile": True}),
    )  # fmt: skip
