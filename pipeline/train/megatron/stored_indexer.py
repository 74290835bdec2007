"""Latent attention with an indexer that keeps its weights and is not run.

Attention to the keys that an indexer chooses is attention to all keys where it chooses all of them
(`pipeline.models.backend_support.check_indexer`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig

from pipeline.models.family import Indexer
from pipeline.train.megatron.local_modules import module_device


class IndexedLatentAttention(MLASelfAttention):
    """Multi-latent attention, with the weights of its layer's indexer, whole on every rank."""

    def __init__(self, config: TransformerConfig, *arguments: Any, indexer: Indexer, **named: Any) -> None:
        super().__init__(config, *arguments, **named)  # pyright: ignore[reportArgumentType] - it is that of latent attention
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": module_device(config)}
        rank: Any = self.config.q_lora_rank
        self.indexer = torch.nn.ModuleDict(
            {
                "wq_b": torch.nn.Linear(rank, indexer.heads * indexer.head_dim, bias=False, **options),
                "wk": torch.nn.Linear(config.hidden_size, indexer.head_dim, bias=False, **options),
                "k_norm": torch.nn.LayerNorm(indexer.head_dim, **options),
                "weights_proj": torch.nn.Linear(config.hidden_size, indexer.heads, bias=False, **options),
            }
        ).requires_grad_(False)
