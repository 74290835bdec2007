"""GLM-5 and GLM-5.1 (https://arxiv.org/abs/2602.15763): DeepSeek-V3's layers, with attention to keys that an indexer chooses.

The indexer scores all earlier tokens and chooses the `index_topk` best. Sequences of at most so many tokens see all keys, so
their attention is DeepSeek-V3's. Only such sequences are trained (`check_indexer`); the indexer has no gradient, in
transformers either, and keeps its weights.

Not supported: layers that share an indexer, and the layer for multi-token prediction, which transformers does not load either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.models import decoder, deepseek
from pipeline.models.family import Features, Indexer, Parameter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipeline.types import Head


def features(config: PreTrainedConfig) -> Features:
    """Return the sizes of the indexers."""
    return Features(indexer=Indexer(config.index_n_heads, config.index_head_dim))


def transformer(config: PreTrainedConfig) -> dict[str, Any]:
    """Return Megatron-Core's configuration. Raises RecipeError as `deepseek.transformer` does, and for shared indexers."""
    decoder.require(config, mlp_bias=False, indexer_types=["full"] * config.num_hidden_layers)
    return deepseek.block(config)


def parameters(config: PreTrainedConfig, head: Head = "logprobs") -> dict[str, Parameter]:
    """Return all parameters, by Megatron name."""
    by_name = deepseek.parameters(config, head)
    for i in range(config.num_hidden_layers):
        for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"):
            target, source = f"decoder.layers.{i}.self_attention.indexer", f"model.layers.{i}.self_attn.indexer"
            by_name |= decoder.unchanged(f"{target}.{name}", f"{source}.{name}")
    return by_name
