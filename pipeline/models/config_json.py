"""Parse config.json as transformers does, without transformers, and check it against the train backends.

`parse_config` returns the attributes of transformers' configuration that a family's `transformer` and `check_attention` read.
With them preflight reports models that the train backends do not support (`unsupported`), even if neither backend is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from pipeline import models
from pipeline.config import DTensorConfig, PolicyConfig, Problem, RecipeError, uses_megatron
from pipeline.models.family import unsupported_model
from pipeline.models.sizes import MODEL_TYPES, QWEN3_5, sizes

_QWEN = {"use_sliding_window": False, "sliding_window": 4096}
_DENSE_QWEN = {**_QWEN, "max_window_layers": 28, "layer_types": None}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "ministral": {"sliding_window": 4096, "layer_types": None},
    "qwen2": _DENSE_QWEN,
    "qwen3": _DENSE_QWEN,
    "qwen3_moe": {**_QWEN, "norm_topk_prob": False},
    "mixtral": {"sliding_window": None, "router_jitter_noise": 0.0, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "deepseek_v3": {
        "norm_topk_prob": True,
        "rope_interleave": True,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    "gemma3_text": {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "sliding_window": 4096,
        "layer_types": None,
        "attn_logit_softcapping": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    "nemotron_h": {
        "use_bias": False,
        "mlp_bias": False,
        "use_conv_bias": True,
        "attention_bias": False,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "sliding_window": None,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "sliding_window": 128,
        "layer_types": None,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "glm4": {"rms_norm_eps": 1.5625e-7},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "glm4_moe": {
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
}
"""The defaults of transformers' configuration classes."""

PACKED_LAYERS = {
    *("full_attention", "sliding_attention", "chunked_attention"),
    *("linear_attention", "conv", "hybrid", "moe", "mlp"),  # with sequence resets, or without tokens that mix
}
"""The `layer_types` of transformers that can compute packed sequences."""


_ROTATED = {"glm4": 0.5, "glm4_moe": 0.5, "qwen3_5_text": 0.25, "qwen3_5_moe_text": 0.25}
"""model_type -> transformers' default share of each head that RoPE rotates. Other families rotate the whole head."""


def parse_config(config: Mapping[str, Any]) -> SimpleNamespace:
    """Return the sizes of a model and its attention, RoPE and routing parameters. Raises as `sizes` does."""
    of = sizes(config)
    positions = config.get("max_position_embeddings")
    if of.model_type == "nemotron_h":  # no RoPE
        found = {name: config.get(name, default) for name, default in _DEFAULTS["nemotron_h"].items()}
        return SimpleNamespace(**vars(of), **found, layer_types=of.layers_block_type, max_position_embeddings=positions)
    found = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "rope_scaling": None, **_DEFAULTS[of.model_type]}
    if of.model_type != "gemma3_text":
        found["hidden_act"] = "silu"
    if of.model_type in QWEN3_5:
        del found["rms_norm_eps"]  # `sizes` has it
    found |= {name: config[name] for name in found if name in config and (name != "rope_scaling" or config[name])}
    if not found.get("use_sliding_window", True):
        found["sliding_window"] = None
    if "layer_types" in found:
        found["layer_types"] = found["layer_types"] or _layer_types(of, found, config)
    theta, scaling, local = (found.pop(name, None) for name in ("rope_theta", "rope_scaling", "rope_local_base_freq"))
    found["rope_parameters"] = config.get("rope_parameters") or _rope(theta, scaling, local)
    share = config.get("partial_rotary_factor", _ROTATED.get(of.model_type))
    if share is not None:
        found["rope_parameters"].setdefault("partial_rotary_factor", share)
    return SimpleNamespace(**vars(of), **found, max_position_embeddings=positions)


def _layer_types(of: SimpleNamespace, found: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    match of.model_type:
        case "gemma3_text":
            pattern = config.get("sliding_window_pattern") or 6
            slides = [(i + 1) % pattern != 0 for i in range(of.num_hidden_layers)]
        case "ministral":
            slides = [found["sliding_window"] is not None for _ in range(of.num_hidden_layers)]
        case "gpt_oss":
            slides = [i % 2 == 0 for i in range(of.num_hidden_layers)]
        case _:
            window = found["sliding_window"] is not None
            slides = [window and i >= found["max_window_layers"] for i in range(of.num_hidden_layers)]
    return ["sliding_attention" if one else "full_attention" for one in slides]


def _rope(theta: float, scaling: Mapping[str, Any] | None, local: float | None) -> dict[str, Any]:
    """Return transformers' `rope_parameters`. local: the RoPE base of sliding-window layers; None if it is `theta` too."""
    scaling = scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    parameters = {**scaling, "rope_theta": theta, "rope_type": kind}
    if local is None:
        return parameters
    return {"full_attention": parameters, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def unsupported(config: Mapping[str, Any], policy: PolicyConfig) -> Iterator[Problem]:
    """Yield the reasons why the train backend cannot train a model.

    For families outside `MODEL_TYPES` only `check_fsdp` applies. Raises as `sizes` does.
    """
    if not uses_megatron(policy):
        yield from _refused(lambda: check_fsdp(config, policy.dtensor_cfg))
    if config.get("model_type") not in MODEL_TYPES:
        return
    of = parse_config(config)
    yield from _refused(lambda: check_attention(of, policy.max_total_sequence_length))
    if uses_megatron(policy):
        yield from _refused(lambda: check_megatron_attention(of, policy.max_total_sequence_length))


def _refused(check: Callable[[], object]) -> Iterator[Problem]:
    try:
        check()
    except RecipeError as error:
        yield from error.problems


def check_fsdp(config: Mapping[str, Any], dtensor: DTensorConfig) -> None:
    """Raise RecipeError for a parallelism that FSDP2 does not support with this model.

    The expert-parallel size must divide the number of experts, and models with latent attention need sequence_parallel=false.
    """
    if dtensor.sequence_parallel and config.get("kv_lora_rank"):
        message = "got true for a model with latent attention, which tensor parallelism leaves whole; expected false"
        raise RecipeError(Problem("policy.dtensor_cfg.sequence_parallel", "unsupported", message))
    key, size = "policy.dtensor_cfg.expert_parallel_size", dtensor.expert_parallel_size
    counts = (config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    count = next((count for count in counts if count), 0)
    if size > 1 and not count:
        raise RecipeError(Problem(key, "too-large", f"got {size}; expected 1, since the model has no experts"))
    if count % size:
        raise RecipeError(Problem(key, "not-divisible", f"got {size}; expected a divisor of the model's {count} experts"))


def check_attention(config: Any, max_length: int) -> None:
    """Raise RecipeError if packed attention does not support the attention of this model.

    config: the result of `parse_config`, or transformers' own configuration. max_length: the longest sequence, in tokens.
    Windows, chunks, soft caps of scores and sinks are supported. For Megatron-Core see `check_megatron_attention` too.
    """
    unknown = set(getattr(config, "layer_types", None) or []) - PACKED_LAYERS
    if unknown:
        raise unsupported_model(
            f"{config.model_type} has layers with {', '.join(sorted(unknown))}; expected {' or '.join(sorted(PACKED_LAYERS))}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(nested for nested in rope.values() if isinstance(nested, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            raise unsupported_model(
                f"{config.model_type} has rope_type {parameters['rope_type']}, which depends on the longest sequence of a"
                " batch, so log-probs would change with the packing"
            )


def check_megatron_attention(config: Any, max_length: int) -> None:
    """Raise RecipeError if the model has windows or soft caps that its family's module does not describe to Megatron-Core.

    The arguments are those of `check_attention`. A window at least as wide as the longest sequence is ignored.
    """
    transformer, features = models.family(config.model_type).transformer(config), models.features(config)
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = window is not None and window < max_length and (kinds is None or "sliding_attention" in kinds)
    if slides and transformer.get("window_size") is None:
        raise unsupported_model(
            f"{config.model_type} has layers with sliding_attention (window {window}, sequences of up to {max_length} tokens),"
            " which its Megatron-Core model does not have. Try policy.megatron_cfg.enabled=false"
        )
    if getattr(config, "attn_logit_softcapping", None) and features.score_softcap is None:
        raise unsupported_model(
            f"{config.model_type} has attn_logit_softcapping={config.attn_logit_softcapping}, which its Megatron-Core model"
            " does not have. Try policy.megatron_cfg.enabled=false"
        )
