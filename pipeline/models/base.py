"""What a model family says of itself: its Megatron-Core configuration, and its parameters as functions of Hugging Face tensors.

A family is a module of this package with two functions of a transformers config:

    transformer(config) -> keyword arguments of megatron-core's TransformerConfig (or MLATransformerConfig), as plain values
    parameters(config, head) -> {Megatron name: Parameter}, in the model's order, with the vocabulary or a value on top

Called with real tensors, a parameter's function converts them. Called with meta tensors under
`pipeline.models.recorded_layout.record`, it gives the layout that export, checkpoints and refit use. Each mapping is therefore
written once, in one direction.

Only the functions need torch, when they run: what a family says can be read without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Split = Literal["none", "rows", "columns", "halves"]
"""How tensor parallelism cuts a whole parameter [out, in] or [out]: not at all; by rows; by columns; by the rows of each of its
two halves (gate and up projections of a gated MLP). A vocabulary is cut by rows after it was padded."""


VALUE_HEAD = "value_head.weight"
"""The Megatron name of a value head [1, H]."""

SCORE = "score.weight"
"""Its name on disk."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One whole Megatron parameter as a function of Hugging Face tensors."""

    sources: tuple[str, ...]  # names in a Hugging Face checkpoint, as they are on disk
    function: Callable[
        ..., torch.Tensor
    ]  # of their tensors, in that order; views, narrow, cat and stack only, so that it can be recorded
    split: Split = "none"
    expert: int | None = None  # which expert it belongs to, over all expert-parallel ranks; cut by *expert* tensor parallelism

    # Names are Megatron-Core's with global layer and expert numbers, those of the local (not TransformerEngine) modules:
    #   embedding.word_embeddings.weight
    #   decoder.layers.3.self_attention.linear_qkv.weight
    #   decoder.layers.3.mlp.experts.local_experts.17.linear_fc1.weight
    #   decoder.final_layernorm.weight
    #   output_layer.weight            (absent where the embedding is tied to it, and where there is a value head)
    #   value_head.weight
