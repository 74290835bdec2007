"""Check a model against the attention and the parallelism that the train backends support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline import models
from pipeline.config import DTensorConfig, PolicyConfig, Problem, RecipeError
from pipeline.models.family import unsupported_model

PACKED_LAYERS = {
    *("full_attention", "sliding_attention", "chunked_attention"),
    *("linear_attention", "conv", "hybrid", "moe", "mlp"),  # with sequence resets, or without tokens that mix
}
"""The `layer_types` of transformers that can compute packed sequences."""

CUT_LATENTS = ("deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
"""Families whose latent attention FSDP2's tensor parallelism cuts, by transformers' plans."""
INDEXED = ("glm_moe_dsa", "deepseek_v32")
"""Families all of whose layers see the keys that an indexer chooses (DeepSeek Sparse Attention)."""


def check_indexer(config: Any, max_length: int) -> None:
    """Raise RecipeError if an indexer would choose among the keys of the longest sequence, which no backend computes.

    config: transformers' configuration. max_length: the longest sequence, in tokens.
    """
    chosen = getattr(config, "index_topk", None)
    if config.model_type in INDEXED and chosen is not None and max_length > chosen:
        raise unsupported_model(
            f"{config.model_type} has an indexer that chooses {chosen} keys of each token; expected sequences of at most"
            f" {chosen} tokens, which see all keys, and policy.max_total_sequence_length is {max_length}"
        )


def check_fsdp(config: Mapping[str, Any], dtensor: DTensorConfig) -> None:
    """Raise RecipeError for a parallelism that FSDP2 does not support with this model.

    The expert-parallel size must divide the number of experts, and most models with latent attention need
    sequence_parallel=false.
    """
    if dtensor.sequence_parallel and config.get("kv_lora_rank") and config.get("model_type") not in CUT_LATENTS:
        message = "got true for a model with latent attention, which tensor parallelism leaves whole; expected false"
        raise RecipeError(Problem("policy.dtensor_cfg.sequence_parallel", "unsupported", message))
    key, size = "policy.dtensor_cfg.expert_parallel_size", dtensor.expert_parallel_size
    count = expert_count(config)
    if size > 1 and not count:
        raise RecipeError(Problem(key, "too-large", f"got {size}; expected 1, since the model has no experts"))
    if count % size:
        raise RecipeError(Problem(key, "not-divisible", f"got {size}; expected a divisor of the model's {count} experts"))


def check_routing(config: Mapping[str, Any], policy: PolicyConfig) -> None:
    """Raise RecipeError if the recipe replays or balances the routing of a model without experts."""
    if expert_count(config):
        return
    if policy.router_replay.enabled:
        message = "got true, but the model has no experts; expected false"
        raise RecipeError(Problem("policy.router_replay.enabled", "has-no-effect", message))
    if policy.moe_aux_loss_coeff:
        message = f"got {policy.moe_aux_loss_coeff:g}, but the model has no experts; expected 0"
        raise RecipeError(Problem("policy.moe_aux_loss_coeff", "has-no-effect", message))


def expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of experts of each mixture; 0 for a dense model."""
    counts = (config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))
    return next((count for count in counts if count), 0)


def check_attention(config: Any) -> None:
    """Raise RecipeError if packed attention does not support the attention of this model.

    config: transformers' configuration. Windows, chunks, soft caps of scores and sinks are supported. For Megatron-Core see
    `check_megatron_attention` too.
    """
    unknown = set(getattr(config, "layer_types", None) or []) - PACKED_LAYERS
    unknown -= {"indexed_attention"} if config.model_type in INDEXED else set()
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
    """Raise RecipeError for windows, soft caps and scaled queries that the family's module does not describe to Megatron-Core.

    config: transformers' configuration. max_length: the longest sequence, in tokens; a window at least as wide is ignored.
    """
    transformer, features = models.family(config.model_type).transformer(config), models.features(config)
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    slides = window is not None and window < max_length and (kinds is None or "sliding_attention" in kinds)
    if slides and transformer.get("window_size") is None:
        raise unsupported_model(
            f"{config.model_type} has layers with sliding_attention (window {window}, sequences of up to {max_length} tokens),"
            " which its Megatron-Core model does not have. Try policy.megatron_cfg.enabled=false"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or 0
    if rope.get("llama_4_scaling_beta") and max_length > original:  # the factor of earlier queries is 1
        raise unsupported_model(
            f"{config.model_type} scales queries beyond position {original} (llama_4_scaling_beta), which its Megatron-Core"
            f" model does not, and sequences have up to {max_length} tokens. Try policy.megatron_cfg.enabled=false"
        )
    if getattr(config, "attn_logit_softcapping", None) and features.score_softcap is None:
        raise unsupported_model(
            f"{config.model_type} has attn_logit_softcapping={config.attn_logit_softcapping}, which its Megatron-Core model"
            " does not have. Try policy.megatron_cfg.enabled=false"
        )
