"""Layers of models that Megatron-Core's TransformerConfig cannot express.

Models have features of `pipeline.models.family.Features`, or are hybrid: each layer of a hybrid model has a mixer along the
sequence (attention, a state space or a delta net), an MLP or experts, or both. Such layers are Megatron-Core's transformer
layers, in which identity functions replace the parts that a layer does not have. So pipeline stages, recomputation, experts and
heads work as in other models. Megatron-Core's own hybrid stack (`megatron.core.ssm`) cannot recompute layers, and has modules
only with TransformerEngine and mamba_ssm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typing_extensions import override

from pipeline.models.family import Features, unsupported_model
from pipeline.models.mixers import DeltaNet, Layer
from pipeline.train.megatron.delta_net import DeltaNetMixer
from pipeline.train.megatron.gpt_oss_experts import AlternatingExperts
from pipeline.train.megatron.joint_norm import JointNorm
from pipeline.train.megatron.layer_heads import LayerHeadsAttention
from pipeline.train.megatron.local_modules import PackedAttention, module_device
from pipeline.train.megatron.mixer import MixerSubmodules
from pipeline.train.megatron.state_space import StateSpaceMixer
from pipeline.train.megatron.stored_indexer import IndexedLatentAttention


class FeaturedLayer(TransformerLayer):
    """A layer with one or several of three features.

    It normalizes the outputs of attention and MLP before it adds them, uses its own kind of rotary embeddings, or has its own
    heads and a constant that multiplies its output.
    """

    def __init__(self, *arguments, features: Features, norm: Callable[..., torch.nn.Module], **named) -> None:
        super().__init__(*arguments, **named)
        self._rotary = None
        self._rotated = None  # angles of a head, where these differ by layer
        if features.layer_heads is not None:
            self._rotated = features.layer_heads[self.layer_number - 1].head_dim
            scalar = torch.empty(1, dtype=self.config.params_dtype, device=module_device(self.config))
            self.layer_scalar = torch.nn.Parameter(scalar, requires_grad=False)
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
            rotary_pos_emb = rotary_pos_emb[self._rotary, ..., : self._rotated]
        return super()._forward_attention(hidden_states, *arguments, rotary_pos_emb=rotary_pos_emb, **named)

    @override
    def forward(self, *arguments, **named):
        hidden, context = super().forward(*arguments, **named)
        return (hidden if self._rotated is None else hidden * self.layer_scalar), context


class SharedHeadsAttention(SelfAttention):
    """Attention of a rank that shares its key-value head with other ranks.

    Megatron-Core 0.16.1 gathers the projections of all heads, and returns views that would keep them in memory until the
    backward pass, with the gates of all heads of the group.
    """

    @override
    def get_query_key_value_tensors(self, *arguments, **named):
        tensors: Any = super().get_query_key_value_tensors(*arguments, **named)
        *of_rank, last = tensors
        if self.config.attention_output_gate:
            ranks = self.world_size // (self.config.num_query_groups or 1)  # that share a head
            last = last.chunk(ranks, 2)[self.tp_group.rank() % ranks]
        return tuple(tensor.contiguous() for tensor in (*of_rank, last))


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
    shares_heads = (config.num_query_groups or config.num_attention_heads) < config.tensor_model_parallel_size
    ours = config.window_size or config.softmax_type != "vanilla" or features.score_softcap is not None
    for layer in layers.values():
        if ours:
            attention = partial(PackedAttention, softcap=features.score_softcap)
            layer.submodules.self_attention.submodules.core_attention = attention
        if shares_heads and getattr(layer.submodules.self_attention, "module", None) is SelfAttention:
            layer.submodules.self_attention.module = SharedHeadsAttention
        if features.indexer is not None:
            spec = layer.submodules.self_attention
            spec.module, spec.params = IndexedLatentAttention, {**spec.params, "indexer": features.indexer}
        if features.layer_heads is not None:
            spec = layer.submodules.self_attention
            spec.module, spec.params = LayerHeadsAttention, {**spec.params, "layer_heads": features.layer_heads}
        if features.joint_head_norms:
            attention = layer.submodules.self_attention.submodules
            attention.q_layernorm = ModuleSpec(JointNorm, params={"heads": config.num_attention_heads})
            attention.k_layernorm = ModuleSpec(JointNorm, params={"heads": config.num_query_groups})
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


# ---- hybrid models ----------------------------------------------------------------------------------------------------------


def with_layers(
    block: TransformerBlockSubmodules, config: TransformerConfig, layers: tuple[Layer, ...]
) -> TransformerBlockSubmodules:
    """Return a stage's spec, changed to the kinds of its layers. layers: the kinds of all layers of the model."""
    first = get_transformer_layer_offset(config)
    specs: list[Any] = list(block.layer_specs or ())  # submodules are annotated as object
    mine = layers[first : first + len(specs)]
    return replace(block, layer_specs=[_layer(spec, kind) for spec, kind in zip(specs, mine, strict=True)])


def _layer(spec: Any, kind: Layer) -> ModuleSpec:
    changes: dict[str, Any] = {}
    if kind.mixer is None:
        changes |= {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
    elif kind.mixer != "attention":
        attention = spec.submodules.self_attention.submodules
        projections = MixerSubmodules(
            attention.linear_qkv, attention.linear_proj
        )  # with TransformerEngine, the first has the norm
        mixer = DeltaNetMixer if isinstance(kind.mixer, DeltaNet) else StateSpaceMixer
        changes["self_attention"] = ModuleSpec(mixer, params={"sizes": kind.mixer}, submodules=projections)
    if not kind.feed_forward:
        changes |= {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    return replace(spec, submodules=replace(spec.submodules, **changes))


# ---- rotary embeddings ------------------------------------------------------------------------------------------------------


def rotary(hf: PreTrainedConfig, layer_type: str | None = None) -> tuple[torch.Tensor, float]:
    """Return (inverse frequencies [R / 2] float32, factor on queries and on keys), as transformers derives them.

    R: the number of rotated entries of each head, which are its first entries. layer_type: a key of rope_parameters, if layers
    differ.
    """
    parameters = hf.rope_parameters if layer_type is None else hf.rope_parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), layer_type=layer_type)
    by_kind: Any = getattr(hf, "is_heterogeneous", False) and hf.per_layer_config
    hf = by_kind[layer_type] if by_kind else hf
    head = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    width = int(head * parameters.get("partial_rotary_factor", 1.0))
    return 1.0 / parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width), 1.0


def softmax_factor(hf: PreTrainedConfig, features: Features) -> float:
    """Return the factor on attention scores that has the same effect as YaRN's factors on queries and keys.

    Raises RecipeError if there is no such factor: if YaRN's factor is on a part of each head, or on some layers only.
    """
    kinds = set(features.layer_rotary or [None])
    factors = {rotary(hf, kind)[1] for kind in kinds}
    parameters: Any = hf.rope_parameters
    if factors != {1.0} and (len(factors) > 1 or parameters.get("partial_rotary_factor", 1.0) != 1.0):
        raise unsupported_model(
            f"{hf.model_type} with YaRN's factor on some layers or on a part of each head is not supported; expected a factor"
            " of 1, or one for all layers and whole heads"
        )
    return factors.pop() ** 2


class LayerRotary(torch.nn.Module):
    """Rotary embeddings of several kinds. It returns the angles [kinds, s, 1, 1, R], of which a layer takes its kind's.

    R is that of the widest kind; zeros follow the angles of others.
    """

    def __init__(self, like: torch.nn.Module, hf: PreTrainedConfig, kinds: list[str]) -> None:
        super().__init__()
        self._kinds = []
        for kind in kinds:
            embedding: Any = copy.copy(like)
            embedding.inv_freq, _ = rotary(hf, kind)
            self._kinds.append(embedding)

    def get_rotary_seq_len(self, *arguments, **named) -> int:
        """Return the number of positions, for Megatron-Core."""
        return self._kinds[0].get_rotary_seq_len(*arguments, **named)

    @override
    def forward(self, *arguments, **named) -> torch.Tensor:
        angles = [embedding(*arguments, **named) for embedding in self._kinds]
        widest = max(of_kind.size(-1) for of_kind in angles)
        return torch.stack([F.pad(of_kind, (0, widest - of_kind.size(-1))) for of_kind in angles])


def rotary_kinds(features: Features) -> list[str]:
    """Return the kinds of rotary embeddings of a model whose layers differ, in the order of `LayerRotary`."""
    return sorted(set(features.layer_rotary or ()))
