"""Mixtures of experts (MoE) with Llama's attention: Qwen3-MoE and Mixtral. The router's softmax weighs the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.models import decoder
from pipeline.models.family import Parameter, unsupported_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipeline.types import Head


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-Core's configuration. Raises RecipeError for biases, RoPE and routing that are not described."""
    qwen = config.model_type == "qwen3_moe"
    decoder.require(config, **({"attention_bias": False} if qwen else {"router_jitter_noise": 0.0}))
    normalized = config.norm_topk_prob if qwen else True  # a token's weights sum to 1
    if normalized and config.num_experts_per_tok == 1:
        raise unsupported_model(
            f"{config.model_type} with num_experts_per_tok=1 and normalized weights is not supported: the router would get no"
            " gradient"
        )
    sparse = sparse_layers(config)
    if not any(sparse):
        raise unsupported_model(f"{config.model_type} without a layer that has experts is not supported")
    return {
        **decoder.transformer(config),
        **decoder.grouped_query_attention(config),
        "qk_layernorm": qwen,
        "num_moe_experts": config.num_local_experts,
        "moe_layer_freq": list(map(int, sparse)),
        "moe_ffn_hidden_size": config.moe_intermediate_size if qwen else config.intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_score_function": "softmax",
        # A softmax over the chosen experts' logits equals one over all experts, normalized over the chosen ones.
        "moe_router_pre_softmax": not normalized,
    }


def sparse_layers(config: PreTrainedConfig) -> list[bool]:
    """Return for each layer whether it has experts."""
    layers = range(config.num_hidden_layers)
    if config.model_type == "mixtral":
        return [True for _ in layers]
    step, dense = config.decoder_sparse_step, config.mlp_only_layers or []
    return [i not in dense and (i + 1) % step == 0 and config.num_local_experts > 0 for i in layers]


def parameters(config: PreTrainedConfig, head: Head = "logprobs") -> dict[str, Parameter]:
    """Return all parameters, by Megatron name."""
    qwen = config.model_type == "qwen3_moe"
    layers: dict[str, Parameter] = {}
    for i, sparse in enumerate(sparse_layers(config)):
        target, source = f"decoder.layers.{i}", f"model.layers.{i}"
        layers |= decoder.norms(target, source)
        layers |= decoder.attention(config, f"{target}.self_attention", f"{source}.self_attn", bias=False, head_norms=qwen)
        if not sparse:
            layers |= decoder.mlp(f"{target}.mlp", f"{source}.mlp")
        elif qwen:
            layers |= decoder.experts(config.num_local_experts, f"{target}.mlp", f"{source}.mlp")
        else:
            layers |= decoder.experts(
                config.num_local_experts, f"{target}.mlp", f"{source}.block_sparse_moe", names=("w1", "w3", "w2")
            )
    return decoder.model(config, layers, head)
