"""MiniMax-M2, M2.1, M2.5 and M2.7: grouped-query attention and a mixture of experts, without shared experts.

Queries have one norm over all heads together, and so have keys. RoPE rotates a part of each head. The router chooses experts by
sigmoid scores plus a bias that balances their load; the weights of a token's experts sum to 1.

Not supported: the layers for multi-token prediction, which transformers does not load either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.models import decoder
from pipeline.models.family import Features, Parameter, unsupported_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipeline.types import Head


def features(config: PreTrainedConfig) -> Features:
    """Return the norms over all heads together."""
    return Features(joint_head_norms=True)


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-Core's configuration. Raises RecipeError for RoPE and routing that are not described."""
    decoder.require(config, router_jitter_noise=0.0)
    if config.num_experts_per_tok == 1:
        raise unsupported_model(f"{config.model_type} with num_experts_per_tok=1 is not supported: the router gets no gradient")
    return {
        **decoder.transformer(config),
        **decoder.grouped_query_attention(config, partial=True),
        "qk_layernorm": True,
        "num_moe_experts": config.num_local_experts,
        "moe_layer_freq": [1] * config.num_hidden_layers,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }


def parameters(config: PreTrainedConfig, head: Head = "logprobs") -> dict[str, Parameter]:
    """Return all parameters, by Megatron name."""
    layers: dict[str, Parameter] = {}
    for i in range(config.num_hidden_layers):
        target, source = f"decoder.layers.{i}", f"model.layers.{i}"
        layers |= decoder.norms(target, source)
        layers |= decoder.attention(config, f"{target}.self_attention", f"{source}.self_attn", bias=False, head_norms=True)
        target, source = f"{target}.mlp", f"{source}.block_sparse_moe"
        layers |= decoder.experts(config.num_local_experts, target, source, names=("w1", "w3", "w2"))
        layers |= decoder.unchanged(f"{target}.router.expert_bias", f"{source}.e_score_correction_bias")
    return decoder.model(config, layers, head)
