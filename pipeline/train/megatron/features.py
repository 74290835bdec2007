"""Layers for model features that Megatron-Core's TransformerConfig cannot express (`pipeline.models.family.Features`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from transformers import PreTrainedConfig
from typing_extensions import override

from pipeline.models.family import Features
from pipeline.train.megatron.gpt_oss_experts import AlternatingExperts
from pipeline.train.megatron.local_modules import PackedAttention
from pipeline.train.megatron.rotary import LayerRotary, rotary, rotary_kinds


class FeaturedLayer(TransformerLayer):
    """A layer with one or both of two features.

    It normalizes the outputs of attention and MLP before it adds them, or uses its own kind of rotary embeddings.
    """

    def __init__(self, *arguments, features: Features, norm: Callable[..., torch.nn.Module], **named) -> None:
        super().__init__(*arguments, **named)
        self._rotary = None
        if features.layer_rotary is not None:
            self._rotary = rotary_kinds(features).index(features.layer_rotary[self.layer_number - 1])
        if features.sandwich_norms:
            make = partial(norm, self.config, self.config.hidden_size, eps=self.config.layernorm_epsilon)
            self.post_self_attn_layernorm, self.post_mlp_layernorm = make(), make()
            self.self_attn_bda = partial(_add_normed, self.self_attn_bda, self.post_self_attn_layernorm)
            self.mlp_bda = partial(_add_normed, self.mlp_bda, self.post_mlp_layernorm)

    @override
    def _forward_attention(self, hidden_states, *arguments, rotary_pos_emb=None, **named):
        if self._rotary is not None and rotary_pos_emb is not None:
            rotary_pos_emb = rotary_pos_emb[self._rotary]
        return super()._forward_attention(hidden_states, *arguments, rotary_pos_emb=rotary_pos_emb, **named)


def _add_normed(add: Callable, norm: torch.nn.Module, training: bool, fused: bool) -> Callable:
    """Return a function that normalizes an output and then adds it to the residual by Megatron-Core's function `add`."""

    def add_and_norm(output_with_bias: tuple, residual: torch.Tensor, dropout: float) -> torch.Tensor:
        output, bias = output_with_bias
        output = norm(output if bias is None else output + bias)
        return add(training, fused)((output, None), residual, dropout)

    return add_and_norm


def with_features(
    block: TransformerBlockSubmodules, config: TransformerConfig, features: Features, norm: Callable[..., torch.nn.Module]
) -> TransformerBlockSubmodules:
    """Return a stage's spec, changed to the layers, experts and attention that the features need. norm: the class of norms.

    Our attention always computes windows, sinks and soft caps, with TransformerEngine too: its kernels do not support all of
    them for packed sequences and context parallelism.
    """
    layers: dict[int, Any] = {id(spec): spec for spec in block.layer_specs or ()}  # submodules are annotated as object
    ours = config.window_size or config.softmax_type != "vanilla" or features.score_softcap is not None
    for layer in layers.values():
        if ours:
            attention = partial(PackedAttention, softcap=features.score_softcap)
            layer.submodules.self_attention.submodules.core_attention = attention
        if features.alternating_experts:
            layer.submodules.mlp.submodules.experts = AlternatingExperts
        if features.sandwich_norms or features.layer_rotary is not None:
            layer.module, layer.params = FeaturedLayer, {**layer.params, "features": features, "norm": norm}
    return block


def set_rotary(stage: GPTModel, hf: PreTrainedConfig, features: Features) -> None:
    """Set the rotary frequencies of a stage to those that transformers derives from the config `hf`."""
    if kinds := rotary_kinds(features):
        several: Any = LayerRotary(stage.rotary_pos_emb, hf, kinds)
        stage.rotary_pos_emb = several
    else:
        stage.rotary_pos_emb.inv_freq, _ = rotary(hf)


def scale_embeddings(stage: GPTModel, scale: float) -> None:
    """Multiply the embeddings of a first stage by a factor, which is rounded to their precision as in transformers."""

    def scale_output(_module, _arguments, output: torch.Tensor) -> torch.Tensor:
        return output * torch.tensor(scale, dtype=output.dtype).item()

    stage.embedding.register_forward_hook(scale_output)
