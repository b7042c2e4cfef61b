"""The records of the planner, and shapes read from configurations of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dlrover.accelerate import Cluster, Strategy, Transformer
from dlrover.errors import ConfigurationError

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 129280,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "head_dim": 64,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "num_hidden_layers": 60, "hidden_size": 5120, "vocab_size": 102400, "intermediate_size": 12288,
    "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "first_k_dense_replace": 1,
}  # fmt: skip
DEEPSEEK_V2_LITE = DEEPSEEK_V2 | {
    "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 64, "q_lora_rank": None,
    "num_attention_heads": 16, "num_key_value_heads": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(DEEPSEEK_V3, 671e9), (DEEPSEEK_V2, 236e9), (DEEPSEEK_V2_LITE, 15.7e9)],
)
def test_latent_attention_has_the_published_parameters(config, parameters):
    shape = Transformer.of(config)
    assert shape.parameters == pytest.approx(parameters, rel=0.002)
    assert (shape.width, shape.rope_dim, shape.value_width) == (128, 64, 128)


def test_parameters_are_those_of_the_published_models():
    assert Transformer.of(LLAMA).parameters == pytest.approx(8.03e9, rel=0.001)
    gpt2 = {"model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "vocab_size": 50257}
    assert Transformer.of(gpt2).parameters == pytest.approx(1.558e9, rel=0.01)
    mixtral = LLAMA | {"num_local_experts": 8, "vocab_size": 32000}
    assert Transformer.of(mixtral).parameters == pytest.approx(46.7e9, rel=0.001)


def test_a_configuration_is_a_mapping_or_an_object_and_may_lie_inside_another():
    shape = Transformer.of(LLAMA)
    assert Transformer.of(SimpleNamespace(**LLAMA)) == shape
    assert Transformer.of({"text_config": LLAMA}) == shape


def test_experts_have_their_own_width_and_dense_layers_before_them():
    config = LLAMA | {
        "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "n_shared_experts": 2, "first_k_dense_replace": 1,
    }  # fmt: skip
    shape = Transformer.of(config)
    assert (shape.ffn, shape.dense_ffn, shape.dense_layers) == (1408, 14336, 1)
    assert (shape.experts, shape.experts_per_token, shape.shared_experts) == (64, 6, 2)


def test_two_matrices_and_ties_follow_from_the_type():
    shape = Transformer.of(
        {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100}
    )
    assert (shape.gated, shape.tied, shape.ffn, shape.kv_heads) == (False, True, 256, 4)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Transformer.of({}), "no num_hidden_layers"),
        (
            lambda: Transformer.of(LLAMA | {"is_encoder_decoder": True}),
            "is_encoder_decoder True; accepted",
        ),
        (lambda: Transformer.of(LLAMA | {"hidden_size": "big"}), "hidden_size is 'big'"),
        (lambda: Transformer(1, 8, 8, 3, 2, 10), "heads is 3, not a multiple of kv_heads 2"),
        (lambda: Transformer(1, 8, 8, 2, 2, 10, experts=4, experts_per_token=5), "between 1 and"),
        (lambda: Transformer(1, 8, 8, 2, 2, 10, dense_layers=2), "more than layers 1"),
        (lambda: Transformer(1, 8, 8, 2, 2, 10, rope_dim=4), "rope_dim is 4: it needs kv_lora"),
        (lambda: Transformer(1, 8, 8, 2, 2, 10, imbalance=0.5), "imbalance is 0.5, not a number"),
        (lambda: Strategy(precision="int8"), "precision is 'int8'; accepted are .*'fp8'"),
        (lambda: Transformer(0, 8, 8, 2, 2, 10), "layers is 0, not a positive integer"),
        (lambda: Strategy(tp=True), "tp is True"),
        (lambda: Strategy(zero=4), "zero is 4, not 0, 1, 2 or 3"),
        (lambda: Strategy(recompute="some"), "recompute is 'some'"),
        (lambda: Strategy(offload=1), "offload is 1, not True or False"),
        (
            lambda: Transformer(1, 8, 8, 2, 2, 10, kept="x"),
            "kept is 'x', not a number of 0 or more",
        ),
        (
            lambda: Transformer(1, 8, 8, 2, 2, 10, imbalance=float("inf")),
            "imbalance is inf, not a number",
        ),
        (
            lambda: Strategy(dp_shard=1 << 40),
            "dp_shard is 1099511627776, not a positive integer, at most",
        ),
        (lambda: Strategy(optimizer_bytes=-1), "not an integer of 0 or more"),
        (lambda: Cluster(nodes=0), "Cluster: nodes is 0"),
        (lambda: Cluster(coefficients=(1.0, 2.0)), "not a tuple of 15 numbers of 0 or more"),
        (lambda: Cluster(coefficients=(float("nan"),) * 15), "not a tuple of 15 numbers"),
        (lambda: Cluster(coefficients=(0.0,) * 15), "some above 0"),
        (lambda: Cluster(coefficients=[1.0] * 15), "not a tuple of 15 numbers"),
        (lambda: Cluster(residuals=[(8, False, True, 2.0)]), "not a tuple of residuals"),
        (lambda: Cluster(residuals=((8, False, 2.0),)), "not a tuple of residuals"),
        (lambda: Cluster(residuals=((8, False, True, 0.0),)), "a positive factor"),
        (lambda: Cluster(residuals=((-3, False, True, 2.0),)), "each of positive ranks"),
        (lambda: Cluster(residuals=((8.5, False, True, 2.0),)), "each of positive ranks"),
        (lambda: Cluster(residuals=((True, False, True, 2.0),)), "each of positive ranks"),
        (lambda: Cluster(residuals=((16, "x", True, 2.0),)), "True or False"),
        (lambda: Cluster(residuals=((16, True, 1, 2.0),)), "True or False"),
        (
            lambda: Cluster(residuals=((16, True, True, 2.0), (16, True, True, 3.0))),
            "of different kinds",
        ),
        (lambda: Cluster(spread=-1.0), "spread is -1.0, not a number of 0 or more"),
    ],
)
def test_a_wrong_value_is_named_in_one_sentence(make, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        make()
