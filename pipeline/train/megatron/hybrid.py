"""Stages of hybrid models: each layer has a mixer along the sequence, an MLP or experts, or both.

A mixer is attention, a state space or a delta net.

Layers are Megatron-Core's transformer layers, in which identity functions replace the parts that a layer does not have. So
pipeline stages, recomputation, experts and heads work as in other models. Megatron-Core's own hybrid stack
(`megatron.core.ssm`) cannot recompute layers, and has modules only with TransformerEngine and mamba_ssm.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from pipeline.models.mixers import DeltaNet, Layer
from pipeline.train.megatron.delta_net import DeltaNetMixer
from pipeline.train.megatron.mixer import MixerSubmodules
from pipeline.train.megatron.state_space import StateSpaceMixer


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
