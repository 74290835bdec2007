"""Attention whose heads differ by layer, with a norm of values, which may come from the projection of keys (Gemma 4)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from typing_extensions import override

from pipeline.config import Problem, RecipeError
from pipeline.models.family import LayerHeads


class LayerHeadsAttention(SelfAttention):
    """Attention with the heads of this layer."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        layer_number: int,
        *arguments: Any,
        layer_heads: Sequence[LayerHeads],
        **named: Any,
    ) -> None:
        heads, ranks = layer_heads[layer_number - 1], config.tensor_model_parallel_size
        if heads.groups % ranks:
            message = (
                f"got {ranks}; expected a divisor of the {heads.groups} key-value heads of a layer, which ranks do not share"
            )
            raise RecipeError(Problem("policy.megatron_cfg.tensor_model_parallel_size", "not-divisible", message))
        own = copy.copy(config)
        own.kv_channels, own.num_query_groups = heads.head_dim, heads.groups
        if not heads.values:
            joint = partial(_without_values, submodules.linear_qkv, heads.head_dim * heads.groups)
            submodules = replace(submodules, linear_qkv=joint)
        super().__init__(own, submodules, layer_number, *arguments, **named)
        self._kinds = 2 if heads.values else 1

    @override
    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any):
        project, norm_query, norm_key = cast(Any, (self.linear_qkv, self.q_layernorm, self.k_layernorm))
        mixed, _ = project(hidden_states)
        groups = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1, self.hidden_size_per_attention_head))
        query, key, value = groups[..., : -self._kinds, :].flatten(2, 3), groups[..., -self._kinds, :], groups[..., -1, :]
        value = F.rms_norm(value, value.shape[-1:], eps=self.config.layernorm_epsilon)
        return norm_query(query), norm_key(key), value


def _without_values(linear: Any, values: int, inputs: int, outputs: int, **named: Any) -> torch.nn.Module:
    """Return Megatron-Core's joint projection without the rows of values."""
    return linear(inputs, outputs - values, **named)
