"""Dense GLM-4 of the 0414 releases: biases of queries, keys and values, norms before and after attention and MLP.

RoPE rotates pairs of neighbouring entries in the first half of each head. The checkpoint has gate and up projection as one
tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.models import decoder
from pipeline.models.family import Features, Parameter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipeline.types import Head

NORMS = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-Core's configuration. Raises RecipeError for RoPE and activations that are not described."""
    return {
        **decoder.transformer(config),
        **decoder.grouped_query_attention(config, partial=True),
        "add_qkv_bias": config.attention_bias,
        "rotary_interleaved": True,
    }


def features(config: PreTrainedConfig) -> Features:
    """Return the features that TransformerConfig cannot express."""
    return Features(sandwich_norms=True)


def parameters(config: PreTrainedConfig, head: Head = "logprobs") -> dict[str, Parameter]:
    """Return all parameters, by Megatron name."""
    layers: dict[str, Parameter] = {}
    for i in range(config.num_hidden_layers):
        target, source = f"decoder.layers.{i}", f"model.layers.{i}"
        layers |= decoder.sandwich_norms(target, source, NORMS)
        layers |= decoder.attention(
            config, f"{target}.self_attention", f"{source}.self_attn", bias=config.attention_bias, head_norms=False
        )
        layers |= decoder.unchanged(f"{target}.mlp.linear_fc1.weight", f"{source}.mlp.gate_up_proj.weight", "halves")
        layers |= decoder.unchanged(f"{target}.mlp.linear_fc2.weight", f"{source}.mlp.down_proj.weight", "columns")
    return decoder.model(config, layers, head)
