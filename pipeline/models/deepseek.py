"""DeepSeek-V3 (https://arxiv.org/abs/2412.19437) and GLM-4.7-Flash: multi-head latent attention and a mixture of experts.

The first layers are dense. The others have a shared expert and routed experts, which are chosen from the best groups of experts
by sigmoid scores plus a bias that balances their load.

Not supported: the layers for multi-token prediction, which transformers does not load either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.models import decoder
from pipeline.models.family import Parameter, unsupported_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipeline.types import Head

LATENT_NORM_EPSILON = 1e-6  # of the latents' norms in transformers, for any rms_norm_eps


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-Core's configuration. Raises RecipeError for attention, RoPE and routing that are not described."""
    decoder.require(config, rope_interleave=True)
    return block(config)


def block(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-Core's configuration of layers with interleaved RoPE. Raises RecipeError as `transformer` does."""
    decoder.require(config, attention_bias=False, num_key_value_heads=config.num_attention_heads)
    return {
        **decoder.transformer(config),
        "num_query_groups": config.num_attention_heads,
        "kv_channels": config.v_head_dim,
        "multi_latent_attention": True,
        "qk_layernorm": True,  # of the latents
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        **_rotary(config),
        **mixture(config),
    }


def _rotary(config: PreTrainedConfig) -> dict[str, Any]:
    parameters = decoder.rotary(config, "default", "yarn")
    if parameters.get("rope_type", "default") == "default":
        return {"rope_type": "rope", "rotary_base": parameters["rope_theta"], "rotary_scaling_factor": 1.0}
    original = parameters["original_max_position_embeddings"]
    # transformers scales the softmax by mscale_all_dim. It scales cosines and sines by the ratio of mscale and mscale_all_dim
    # if both are given, and otherwise as with mscale=1 and mscale_all_dim=0.
    all_dimensions = parameters.get("mscale_all_dim") or 0.0
    mscale = (parameters.get("mscale") or 0.0) if all_dimensions else 1.0
    if not mscale or parameters.get("attention_factor") is not None or not parameters.get("truncate", True):
        raise unsupported_model(
            f"{config.model_type} does not support YaRN with attention_factor, truncate=false, or mscale_all_dim without mscale"
        )
    return {
        "rope_type": "yarn",
        "rotary_base": parameters["rope_theta"],
        "rotary_scaling_factor": parameters.get("factor") or config.max_position_embeddings / original,
        "original_max_position_embeddings": original,
        "beta_fast": parameters.get("beta_fast") or 32,
        "beta_slow": parameters.get("beta_slow") or 1,
        "mscale": mscale,
        "mscale_all_dim": all_dimensions,
    }


def mixture(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-Core's configuration of the mixture of experts. Raises RecipeError for routing that is not described."""
    topk, groups, chosen = config.num_experts_per_tok, config.n_group, config.topk_group
    decoder.require(config, norm_topk_prob=topk > 1)  # Megatron-Core's rule for sigmoid scores
    limited = chosen < groups
    if limited and topk // chosen != 2:
        raise unsupported_model(
            f"{config.model_type} with num_experts_per_tok={topk} and topk_group={chosen} is not supported: transformers scores"
            " a group by its two best experts, and Megatron-Core by its num_experts_per_tok // topk_group best experts;"
            " expected 2 for this quotient"
        )
    sparse = sparse_layers(config)
    if not config.n_shared_experts or not any(sparse):
        raise unsupported_model(
            f"{config.model_type} without a shared expert or without a layer that has experts is not supported"
        )
    return {
        "num_moe_experts": config.n_routed_experts,
        "moe_layer_freq": list(map(int, sparse)),
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        **({"moe_router_num_groups": groups, "moe_router_group_topk": chosen} if limited else {}),
    }


def sparse_layers(config: PreTrainedConfig) -> list[bool]:
    """Return for each layer whether it has experts."""
    if kinds := getattr(config, "mlp_layer_types", None):
        return [kind == "sparse" for kind in kinds]
    return [i >= config.first_k_dense_replace for i in range(config.num_hidden_layers)]


def parameters(config: PreTrainedConfig, head: Head = "logprobs") -> dict[str, Parameter]:
    """Return all parameters, by Megatron name."""
    layers: dict[str, Parameter] = {}
    for i, sparse in enumerate(sparse_layers(config)):
        target, source = f"decoder.layers.{i}", f"model.layers.{i}"
        layers |= decoder.norms(target, source)
        layers |= _attention(config, f"{target}.self_attention", f"{source}.self_attn")
        layers |= experts(config, f"{target}.mlp", f"{source}.mlp") if sparse else decoder.mlp(f"{target}.mlp", f"{source}.mlp")
    return decoder.model(config, layers, head)


def experts(config: PreTrainedConfig, target: str, source: str) -> dict[str, Parameter]:
    """Return the parameters of a router with its bias, the routed experts and the shared experts."""
    return {
        **decoder.experts(config.n_routed_experts, target, source),
        **decoder.unchanged(f"{target}.router.expert_bias", f"{source}.gate.e_score_correction_bias"),
        **decoder.mlp(f"{target}.shared_experts", f"{source}.shared_experts"),
    }


def _attention(config: PreTrainedConfig, target: str, source: str) -> dict[str, Parameter]:
    if config.q_lora_rank is None:
        query = decoder.unchanged(f"{target}.linear_q_proj.weight", f"{source}.q_proj.weight", "rows")
    else:
        query = {
            **decoder.unchanged(f"{target}.linear_q_down_proj.weight", f"{source}.q_a_proj.weight", "rows"),
            **decoder.unchanged(f"{target}.q_layernorm.weight", f"{source}.q_a_layernorm.weight"),
            **decoder.unchanged(f"{target}.linear_q_up_proj.weight", f"{source}.q_b_proj.weight", "rows"),
        }
    return {
        **query,
        **decoder.unchanged(f"{target}.linear_kv_down_proj.weight", f"{source}.kv_a_proj_with_mqa.weight", "rows"),
        **decoder.unchanged(f"{target}.kv_layernorm.weight", f"{source}.kv_a_layernorm.weight"),
        **decoder.unchanged(f"{target}.linear_kv_up_proj.weight", f"{source}.kv_b_proj.weight", "rows"),
        **decoder.unchanged(f"{target}.linear_proj.weight", f"{source}.o_proj.weight", "columns"),
    }
