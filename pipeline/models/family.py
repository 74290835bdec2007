"""Define the contents of a model family's module: Megatron-Core's configuration, and functions from Hugging Face tensors.

A family is a module of this package with two functions of a transformers config. It has a third function if the models have
features for which TransformerConfig has no arguments:

    transformer(config) -> keyword arguments of megatron-core's TransformerConfig (or MLATransformerConfig), as plain values
    parameters(config, head) -> {Megatron name: Parameter}, in the model's order; the head gives log-probs or values
    features(config) -> Features, which TransformerConfig cannot express

TransformerConfig expresses more than sizes: window_size=(w - 1, 0) with window_attn_skip_freq=[1 for a layer with it, else 0],
softmax_type="learnable" (attention sinks, `self_attention.core_attention.softmax_offset`), softmax_scale,
layernorm_zero_centered_gamma (norms multiply by 1 + weight), attention_output_gate, rotary_interleaved, glu_linear_offset,
activation_func_clamp_value, add_bias_linear (of every projection, router and expert). Its activation_func is a name of
`pipeline.train.megatron.model.ACTIVATIONS`. The config's rope_parameters have the share of each head that RoPE rotates.

Each mapping is written once, in one direction. Called with real tensors, a parameter's function converts them. Called with meta
tensors under `pipeline.models.recorded_layout.record`, it gives the layout that export, checkpoints and refit use.

Only the functions of tensors need torch, and import it when they run. The rest works where torch is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.models.mixers import Layer
from pipeline.recipe.problems import Problem, RecipeError

if TYPE_CHECKING:
    import torch

Split = Literal["none", "rows", "columns", "halves"] | tuple[int, ...]
"""The tensor-parallel split of a whole parameter [out, in] or [out]. "halves" cuts the rows of each of the two halves (gate and
up projections of a gated MLP). A tuple has the numbers of rows of the parameter's parts, and cuts the rows of each part. A
vocabulary is padded and then cut by rows."""


VALUE_HEAD = "value_head.weight"
"""The Megatron name of a value head [1, H]."""

SCORE = "score.weight"
"""The Hugging Face name of a value head [1, H]."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One whole Megatron parameter as a function of Hugging Face tensors."""

    sources: tuple[str, ...]  # names of the tensors in a Hugging Face checkpoint
    function: Callable[..., torch.Tensor]  # of these tensors, in this order; views, narrow, cat and stack only: it is recorded
    split: Split = "none"
    expert: int | None = None  # number of its expert over all expert-parallel ranks; *expert* tensor parallelism cuts it

    # Names are Megatron-Core's with global layer and expert numbers, those of the local (not TransformerEngine) modules:
    #   embedding.word_embeddings.weight
    #   decoder.layers.3.self_attention.linear_qkv.weight
    #   decoder.layers.3.mlp.experts.local_experts.17.linear_fc1.weight
    #   decoder.final_layernorm.weight
    #   output_layer.weight            (absent where it is tied to the embedding, and where there is a value head)
    #   value_head.weight


@dataclass(frozen=True, slots=True)
class Indexer:
    """The sizes of a layer's indexer, which chooses the keys that a token sees."""

    heads: int
    head_dim: int


CONSTANTS = ("expert_bias", "layer_scalar")
"""Ends of Megatron names of tensors that checkpoints have and that never train."""


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The heads of a layer's attention."""

    head_dim: int
    groups: int  # heads of keys
    values: bool  # whether values have a projection; if not, they are the projected keys


@dataclass(frozen=True, slots=True)
class Features:
    """Features of a model for which TransformerConfig has no arguments. `pipeline/train/megatron/features.py` builds them."""

    # Norms of the outputs of attention and MLP, before the residual is added: decoder.layers.3.post_self_attn_layernorm.weight,
    # decoder.layers.3.post_mlp_layernorm.weight.
    sandwich_norms: bool = False
    joint_head_norms: bool = False  # the norm of queries is over all heads together, and so is that of keys
    embedding_scale: float | None = None  # factor of the embeddings, rounded to the precision of the weights
    score_softcap: float | None = None  # attention scores s become softcap * tanh(s / softcap)
    # Experts as in gpt-oss's checkpoint: weights [in, out], gate and up projection alternating, whole on their ranks.
    alternating_experts: bool = False
    indexer: Indexer | None = None  # of every layer; its weights are stored, and it is not run
    layer_rotary: tuple[str, ...] | None = None  # of each layer, its key in rope_parameters, where layers have their own RoPE
    rotary: bool = True  # whether there is RoPE
    # Of each layer, where layers differ. Values then have a norm without weights, and decoder.layers.3.layer_scalar multiplies
    # the layer's output.
    layer_heads: tuple[LayerHeads, ...] | None = None
    layers: tuple[Layer, ...] | None = None  # of a hybrid model; None: every layer has attention and an MLP or experts


def unsupported_model(message: str) -> RecipeError:
    """Return the error for a policy.model_name that a train backend does not support."""
    return RecipeError(Problem("policy.model_name", "unsupported", message))
