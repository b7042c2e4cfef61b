"""The shape of a model from its configuration of Hugging Face transformers, without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlrover.errors import ConfigurationError

NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab": ("vocab_size",),
}
"""Names of each size, by family of models."""
FEED_FORWARD = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_kv_heads")
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k")
TWO_MATRICES = {
    *("bert", "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj"),
    *(
        "mpt",
        "nemotron",
        "opt",
        "persimmon",
        "phi",
        "roberta",
        "stablelm_alpha",
        "starcoder2",
        "xglm",
    ),
}
"""Types of models whose feed-forward layer is not gated."""
TIED = {
    "bloom",
    "codegen",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_bigcode",
    "opt",
}
"""Types of models that tie the output layer to the embedding unless their configuration says otherwise."""


def shape(config: Any) -> dict[str, Any]:
    """Return the fields of the :class:`Transformer` that ``config`` describes.

    Raises:
        ConfigurationError: a size is missing or is no positive integer, or the model is no decoder alone.
    """
    config = _inner(config)
    if _read(config, "is_encoder_decoder"):
        raise ConfigurationError(
            "The configuration has is_encoder_decoder True; accepted are models of one stack of layers, as decoders are."
        )
    found = {field: _number(config, *names) for field, names in NAMES.items()}
    for field, value in found.items():
        if not value:
            raise ConfigurationError(
                f"The configuration has no {NAMES[field][0]}, which a Transformer needs as {field}."
            )
    kind = str(_read(config, "model_type") or "")
    hidden, heads = found["hidden"], found["heads"]
    ffn = _number(config, *FEED_FORWARD) or 4 * hidden
    tied = _read(config, "tie_word_embeddings")
    fields: dict[str, Any] = {
        **found,
        "ffn": ffn,
        "kv_heads": 1 if _read(config, "multi_query") else _number(config, *KV_HEADS) or heads,
        "head_dim": _number(config, "head_dim"),
        "gated": kind not in TWO_MATRICES,
        "tied": kind in TIED if tied is None else bool(tied),
    }
    return {**fields, **_latent(config), **_experts(config, ffn)}


def _latent(config: Any) -> dict[str, Any]:
    """The fields of multi-head latent attention."""
    compressed = _number(config, "kv_lora_rank")
    if not compressed:
        return {}
    return {
        "kv_lora": compressed,
        "q_lora": _number(config, "q_lora_rank"),
        # here, ``head_dim`` is the rotary part or the sum of both
        "head_dim": _number(config, "qk_nope_head_dim"),
        "rope_dim": _number(config, "qk_rope_head_dim"),
        "value_dim": _number(config, "v_head_dim"),
        "kv_heads": _number(config, *NAMES["heads"]),
    }


def _experts(config: Any, ffn: int) -> dict[str, Any]:
    experts = _number(config, *EXPERTS)
    if experts < 2:
        return {}
    width = _number(config, "moe_intermediate_size", "expert_ffn_hidden_size") or ffn
    shared = _number(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    shared = shared or -(-_number(config, "shared_expert_intermediate_size") // width)
    return {
        "ffn": width,
        "experts": experts,
        "experts_per_token": _number(config, *PER_TOKEN) or min(2, experts),
        "shared_experts": shared,
        "dense_layers": _number(config, "first_k_dense_replace"),
        "dense_ffn": ffn,
    }


def _inner(config: Any) -> Any:
    """The text part of a configuration that has several."""
    inner = _read(config, "text_config") or _read(config, "llm_config")
    return config if inner is None else inner


def _read(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _number(config: Any, *names: str) -> int:
    """The first of some sizes that is given, or 0."""
    for name in names:
        value = _read(config, name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigurationError(
                    f"The configuration's {name} is {value!r}, not a positive integer."
                )
            return value
    return 0
