"""Gemma 4's dense language models (31B; https://ai.google.dev/gemma/docs/core/model_card_4).

Layers with full attention have heads of another size and number than those with a sliding window, and may take their values
from the projection of keys. Values have a norm without weights, and queries no scale. Norms stand before and after attention
and MLP; a layer's output is multiplied by a constant.

Not supported: experts beside the MLP, embeddings of each layer, and layers that share keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.models import decoder
from pipeline.models.family import Features, LayerHeads, Parameter, unsupported_model
from pipeline.models.gemma3 import NORMS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipeline.types import Head


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-Core's configuration. Raises RecipeError for layers, masks and RoPE that are not described."""
    decoder.require(
        config,
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        enable_moe_block=False,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
    )
    if config.use_bidirectional_attention == "all":
        raise unsupported_model(
            "gemma4_text with use_bidirectional_attention='all' is not supported; expected 'vision' or null"
        )
    for parameters in config.rope_parameters.values():
        if (kind := parameters["rope_type"]) not in ("default", "proportional"):
            raise unsupported_model(f"gemma4_text with RoPE of type '{kind}' is not supported; expected default, proportional")
    first = decoder.layer_configs(config)[0]  # `features` has the heads of each layer
    return {
        **decoder.block(config),
        "activation_func": "gelu_tanh",
        "num_query_groups": first.num_key_value_heads,
        "kv_channels": first.head_dim,
        **decoder.windows(config),
        "softmax_scale": 1.0,
        "qk_layernorm": True,
    }


def features(config: PreTrainedConfig) -> Features:
    """Return the features that TransformerConfig cannot express."""
    return Features(
        sandwich_norms=True,
        embedding_scale=config.hidden_size**0.5,
        layer_rotary=decoder.layer_rotary(config),
        layer_heads=tuple(
            LayerHeads(layer.head_dim, layer.num_key_value_heads, values=not _keys_are_values(config, i))
            for i, layer in enumerate(decoder.layer_configs(config))
        ),
    )


def _keys_are_values(config: PreTrainedConfig, layer: int) -> bool:
    return config.attention_k_eq_v and config.layer_types[layer] == "full_attention"


def parameters(config: PreTrainedConfig, head: Head = "logprobs") -> dict[str, Parameter]:
    """Return all parameters, by Megatron name."""
    layers: dict[str, Parameter] = {}
    for i, layer in enumerate(decoder.layer_configs(config)):
        target, source = f"decoder.layers.{i}", f"model.layers.{i}"
        layers |= decoder.sandwich_norms(target, source, NORMS)
        parts = "qk" if _keys_are_values(config, i) else "qkv"
        layers |= decoder.attention(layer, f"{target}.self_attention", f"{source}.self_attn", False, True, parts)
        layers |= decoder.mlp(f"{target}.mlp", f"{source}.mlp")
        layers |= decoder.unchanged(f"{target}.layer_scalar", f"{source}.layer_scalar")
    return decoder.model(config, layers, head)
