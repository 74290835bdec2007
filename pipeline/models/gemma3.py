"""Gemma 3's language model (https://arxiv.org/abs/2503.19786).

Most layers have a sliding window and their own RoPE base. Norms multiply by 1 + weight, stand before and after attention and
MLP, and norm queries and keys too. Embeddings are scaled, and the MLP is gated with tanh-approximated GELU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.models import decoder
from pipeline.models.family import Features, Parameter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipeline.types import Head

NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-Core's configuration. Raises RecipeError for biases, soft caps and masks that are not described."""
    decoder.require(
        config,
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        use_bidirectional_attention=False,
    )
    return {
        **decoder.block(config),
        "activation_func": "gelu_tanh",
        **decoder.grouped_query_attention(config),
        "softmax_scale": config.query_pre_attn_scalar**-0.5,
        "qk_layernorm": True,
        "layernorm_zero_centered_gamma": True,
    }


def features(config: PreTrainedConfig) -> Features:
    """Return the features that TransformerConfig cannot express."""
    return Features(sandwich_norms=True, embedding_scale=config.hidden_size**0.5, layer_rotary=decoder.layer_rotary(config))


def parameters(config: PreTrainedConfig, head: Head = "logprobs") -> dict[str, Parameter]:
    """Return all parameters, by Megatron name."""
    layers: dict[str, Parameter] = {}
    for i in range(config.num_hidden_layers):
        target, source = f"decoder.layers.{i}", f"model.layers.{i}"
        layers |= decoder.sandwich_norms(target, source, NORMS)
        layers |= decoder.attention(config, f"{target}.self_attention", f"{source}.self_attn", bias=False, head_norms=True)
        layers |= decoder.mlp(f"{target}.mlp", f"{source}.mlp")
    return decoder.model(config, layers, head)
