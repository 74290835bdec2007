"""GLM-4.5 and GLM-4.6 (https://arxiv.org/abs/2508.06471): grouped-query attention and DeepSeek-V3's mixture of experts.

RoPE rotates half of each head. Queries, keys and values have biases, and models of some sizes have norms of queries and keys.

Not supported: the layer for multi-token prediction, which transformers does not load either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.models import decoder, deepseek
from pipeline.models.family import Parameter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipeline.types import Head


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-Core's configuration. Raises RecipeError for RoPE and routing that are not described."""
    return {
        **decoder.transformer(config),
        **decoder.grouped_query_attention(config, partial=True),
        "add_qkv_bias": config.attention_bias,
        "qk_layernorm": config.use_qk_norm,
        **deepseek.mixture(config),
    }


def parameters(config: PreTrainedConfig, head: Head = "logprobs") -> dict[str, Parameter]:
    """Return all parameters, by Megatron name."""
    layers: dict[str, Parameter] = {}
    for i, sparse in enumerate(deepseek.sparse_layers(config)):
        target, source = f"decoder.layers.{i}", f"model.layers.{i}"
        layers |= decoder.norms(target, source)
        layers |= decoder.attention(
            config,
            f"{target}.self_attention",
            f"{source}.self_attn",
            bias=config.attention_bias,
            head_norms=config.use_qk_norm,
        )
        if sparse:
            layers |= deepseek.experts(config, f"{target}.mlp", f"{source}.mlp")
        else:
            layers |= decoder.mlp(f"{target}.mlp", f"{source}.mlp")
    return decoder.model(config, layers, head)
