"""Dense decoders with grouped-query attention: Llama, Mistral, Qwen2 (biases of queries, keys, values), Qwen3 (head norms).

Ministral 3 is Mistral with YaRN; its scale of later queries is refused (backend_support.py). All layers (Mistral 7B v0.1) or
some of them (Qwen2, Qwen3) may have sliding windows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.models import decoder
from pipeline.models.family import Parameter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipeline.types import Head


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-Core's configuration. Raises RecipeError for biases and RoPE that are not described."""
    if config.model_type == "llama":
        decoder.require(config, attention_bias=False, mlp_bias=False)
    if config.model_type == "qwen3":
        decoder.require(config, attention_bias=False)
    return {
        **decoder.transformer(config),
        **decoder.grouped_query_attention(config),
        "add_qkv_bias": config.model_type == "qwen2",
        "qk_layernorm": config.model_type == "qwen3",
    }


def parameters(config: PreTrainedConfig, head: Head = "logprobs") -> dict[str, Parameter]:
    """Return all parameters, by Megatron name."""
    layers: dict[str, Parameter] = {}
    for i in range(config.num_hidden_layers):
        target, source = f"decoder.layers.{i}", f"model.layers.{i}"
        layers |= decoder.norms(target, source)
        layers |= decoder.attention(
            config,
            f"{target}.self_attention",
            f"{source}.self_attn",
            bias=config.model_type == "qwen2",
            head_norms=config.model_type == "qwen3",
        )
        layers |= decoder.mlp(f"{target}.mlp", f"{source}.mlp")
    return decoder.model(config, layers, head)
