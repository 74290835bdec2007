"""Read the sizes of a decoder from its config.json as transformers does, without transformers.

Released config.json files leave out keys that have transformers' defaults, and some keys have two names. `sizes` returns a
value for every key, under the name of transformers' attribute. Sizes without a default are required.

Not supported: config.json files of multimodal models, which have the language model's keys under `text_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

_REQUIRED = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_REQUIRED_BY_FAMILY: dict[str, tuple[str, ...]] = {
    "qwen3_moe": ("moe_intermediate_size", "num_local_experts"),
    "mixtral": ("num_local_experts",),
    "deepseek_v3": (*_LATENT, "moe_intermediate_size", "n_routed_experts", "first_k_dense_replace"),
    "gpt_oss": ("num_local_experts",),
    "nemotron_h": ("layers_block_type",),
    "glm4_moe": ("moe_intermediate_size", "n_routed_experts"),
}
_WITHOUT_MLP = ("qwen3_5_moe_text",)
"""Families whose layers all have experts, and whose config.json has no intermediate size of an MLP."""

_EITHER_NAME = {"num_local_experts": "num_experts", "n_routed_experts": "num_local_experts"}
"""transformers' name of the number of experts -> the other name that config.json may use."""

_DELTA_NET = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "attention_bias": False,
    "layer_types": None,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,  # no size, but of the mixers
}
"""Defaults of Qwen3.5, whose layers have attention or a gated delta net."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "attention_bias": False, "mlp_bias": False},
    "mistral": {"num_key_value_heads": 8},
    "ministral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "attention_bias": False,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral": {"num_key_value_heads": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 128,
        "attention_bias": False,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
    },
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "attention_bias": False,
        "tie_word_embeddings": True,
    },
    "nemotron_h": {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "time_step_min": 0.001,  # these two are no sizes, but of the mixers
        "layer_norm_epsilon": 1e-5,
    },
    "glm4": {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    "glm4_moe": {
        "num_key_value_heads": 8,
        "attention_bias": False,
        "use_qk_norm": False,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "num_experts_per_tok": 4},
    "qwen3_5_text": {"num_key_value_heads": 4, **_DELTA_NET},
    "qwen3_5_moe_text": {
        "num_key_value_heads": 2,
        **_DELTA_NET,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
}
"""The defaults of transformers' configuration classes, for keys that released config.json files leave out."""

MODEL_TYPES = tuple(_DEFAULTS)
"""The `model_type`s that are described."""

_NULLABLE = ("num_key_value_heads", "head_dim", "q_lora_rank", "mlp_only_layers", "attention_bias", "tie_word_embeddings")
"""Keys for which null has a meaning in every family. For others null counts as a missing key."""

QWEN3_5 = ("qwen3_5_text", "qwen3_5_moe_text")
"""Families with gated delta nets, and with an MLP or experts in every layer."""

ALIASES = {"kimi_k2": "deepseek_v3"}
"""A `model_type` that transformers does not know -> the `model_type` of the same model in transformers."""


def sizes(config: Mapping[str, Any]) -> SimpleNamespace:
    """Return the keys of config.json that determine sizes of tensors, as attributes.

    Raises ValueError for a family that is not described, and KeyError for a size that is null, or that is missing and has no
    default.
    """
    family = ALIASES.get(config.get("model_type", ""), config.get("model_type"))
    if family not in _DEFAULTS:
        raise ValueError(f"the tensors of '{family}' models are not known; expected one of {', '.join(MODEL_TYPES)}")
    if family == "nemotron_h":
        config = {**config, **_hybrid(config)}
    elif family in QWEN3_5:
        config = {**config, "layer_types": _mixers(config)}
    values = {"model_type": family, "tie_word_embeddings": False, "head_dim": None, **_DEFAULTS[family]}
    values |= {name: config[name] for name in values if name in config and name != "model_type"}
    for name in (*_REQUIRED, *_REQUIRED_BY_FAMILY.get(family, ())):
        if name not in values and not (name == "intermediate_size" and family in _WITHOUT_MLP):
            alias = _EITHER_NAME.get(name)
            values[name] = config[alias] if alias is not None and name not in config and alias in config else config[name]
    for name, value in values.items():
        if value is None and name not in _NULLABLE and _DEFAULTS[family].get(name, 0) is not None:
            raise KeyError(name)
    heads = values["num_attention_heads"]
    values["num_key_value_heads"] = values["num_key_value_heads"] or heads
    if family == "deepseek_v3":  # its heads have two sizes
        del values["head_dim"]
    else:
        values["head_dim"] = values["head_dim"] or values["hidden_size"] // heads
    if "mlp_only_layers" in values:
        values["mlp_only_layers"] = values["mlp_only_layers"] or []
    values["tie_word_embeddings"] = bool(values["tie_word_embeddings"])
    return SimpleNamespace(**values)


_OLDER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_chunk_size": "chunk_size",
    "mamba_dt_min": "time_step_min",
}
"""Other names in config.json of a hybrid model -> transformers' names. If both are there, the value under the other counts."""


def _hybrid(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers and mixers of a hybrid model under the names of transformers' newest version."""
    mixers = {ours: config[older] for older, ours in _OLDER_NAMES.items() if older in config}
    names = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    kinds = config.get("layers_block_type") or config.get("layer_types") or config["hybrid_override_pattern"]
    layers = [names.get(kind, kind) for kind in kinds]
    return {"layers_block_type": layers, "num_hidden_layers": len(layers), **mixers}


def _mixers(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer of Qwen3.5: linear_attention (a gated delta net) or full_attention."""
    every = config.get("full_attention_interval", 4)
    layers = range(1, config["num_hidden_layers"] + 1)
    return config.get("layer_types") or ["linear_attention" if i % every else "full_attention" for i in layers]


def sparse_layers(config: Any) -> list[bool]:
    """Return for each layer whether it has experts. config: the result of `sizes`, or transformers' configuration."""
    layers = range(config.num_hidden_layers)
    match config.model_type:
        case "mixtral" | "gpt_oss" | "qwen3_5_moe_text":
            return [True for _ in layers]
        case "qwen3_moe":
            step, dense = config.decoder_sparse_step, config.mlp_only_layers
            return [i not in dense and (i + 1) % step == 0 and config.num_local_experts > 0 for i in layers]
        case "nemotron_h":
            return [kind == "moe" for kind in config.layers_block_type]
        case "deepseek_v3" | "glm4_moe":
            return [i >= config.first_k_dense_replace for i in layers]
    return [False for _ in layers]


def layer_kinds(config: Any) -> list[str]:
    """Return the kind of each layer. Layers of the same kind have the same tensors. config: as in `sparse_layers`.

    Layers with attention are "dense" (with an MLP) or "sparse" (with experts). Hybrid models have transformers' names of kinds.
    """
    if config.model_type in QWEN3_5:
        return list(config.layer_types)
    if config.model_type == "nemotron_h":
        return list(config.layers_block_type)
    return ["sparse" if sparse else "dense" for sparse in sparse_layers(config)]
