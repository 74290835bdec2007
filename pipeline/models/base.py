"""The module of a model family: Megatron-Core's configuration, and parameters as functions of Hugging Face tensors.

A family is a module of this package with two functions of a transformers config:

    transformer(config) -> keyword arguments of megatron-core's TransformerConfig (or MLATransformerConfig), as plain values
    parameters(config, head) -> {Megatron name: Parameter}, in the model's order; the head gives log-probs or values

Called with real tensors, a parameter's function converts them. Called with meta tensors under
`pipeline.models.recorded_layout.record`, it gives the layout that export, checkpoints and refit use. Each mapping is therefore
written once, in one direction.

Only the functions of tensors need torch, and import it when they run. The rest works where torch is not installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipeline.problems import Problem, RecipeError

if TYPE_CHECKING:
    import torch

Split = Literal["none", "rows", "columns", "halves"]
"""The tensor-parallel split of a whole parameter [out, in] or [out]: none; by rows; by columns; by the rows of each of its two
halves (gate and up projections of a gated MLP). A vocabulary is padded and then cut by rows."""


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


def unsupported_model(message: str) -> RecipeError:
    """Return the error for a policy.model_name that a train backend does not support."""
    return RecipeError(Problem("policy.model_name", "unsupported", message))
