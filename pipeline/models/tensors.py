"""List the tensors of a model's checkpoint, by transformers' own model on the meta device.

Names and shapes are those on disk, as transformers saves a model: one tensor per expert, except for families such as gpt_oss,
which have one tensor for all experts of a layer.

Not listed: layers for multi-token prediction, which transformers does not load, quantized weights, and the other parts of
multimodal models.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pipeline.models.family import unsupported_model
from pipeline.recipe.problems import RecipeError

Part = Literal[
    "embedding", "output", "attention", "mlp", "shared", "routed", "router", "layer inputs", "norm", "buffer", "unknown"
]
"""The part of the model to which a tensor belongs. embedding: also a table for each layer (Gemma 4); layer inputs: the
projections of such a table; attention: attention, or another mixer in its place; router: also the projections to and from the
latent of experts; shared: experts that process every token; routed: experts that a router selects;
norm: norms of layers and inside attention; buffer: saved, but not a parameter (the bias of DeepSeek's router); unknown: another
matrix."""

_PARTS: tuple[tuple[Part, str], ...] = (  # the first pattern that a name contains decides
    ("output", r"^lm_head\."),
    ("shared", r"\.shared_experts?\."),
    ("routed", r"\.experts\."),
    ("layer inputs", r"\.per_layer_(input_gate|projection|model_projection)\."),
    ("router", r"\.(gate|router|shared_expert_gate|fc\d_latent_proj)\."),
    ("mlp", r"\.(mlp|feed_forward|mixer\.(up|down)_proj)\."),
    ("attention", r"\.(linear_attn|mamba|mixer)\."),  # with their gated norms
    ("norm", r"norm\w*\.(weight|bias)$"),
    ("attention", r"\.(self_attn|attn|attention)\."),
    ("embedding", r"(^|\.)(embed\w*|wte|wpe)\."),
)
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Tensor(NamedTuple):
    """A tensor on disk, e.g. Tensor("model.layers.3.mlp.experts.17.up_proj.weight", (768, 2048), "routed", 3, 17)."""

    name: str
    shape: tuple[int, ...]
    part: Part
    layer: int | None = None
    expert: int | None = None

    @property
    def numel(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)


def can_describe() -> bool:
    """Return whether torch and transformers are installed, which describe models."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def tensors(config: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of a causal language model, without a tied output layer.

    config: a config.json. Imports torch and transformers. Raises RecipeError for a model that transformers cannot build.
    """
    try:
        return list(_tensors(json.dumps(config, sort_keys=True, default=str)))
    except RecipeError:
        raise
    except Exception as error:  # whatever a model's code raises for sizes that do not fit, or for a missing package
        message = f"transformers cannot build this {config.get('model_type')} model: {type(error).__name__}: {error}"
        raise unsupported_model(message) from error


@functools.lru_cache(maxsize=8)
def _tensors(config: str) -> tuple[Tensor, ...]:
    from pipeline.models import hugging_face  # imports torch and transformers, which submission may lack

    model = hugging_face.meta_model(hugging_face.config_of(json.loads(config)))
    state = hugging_face.state(model)
    parameters = {name for name, _ in model.named_parameters()}
    buffers = hugging_face.on_disk(model, {name: tensor for name, tensor in state.items() if name not in parameters})
    stored = hugging_face.on_disk(model, state)
    return tuple(described(name, tuple(tensor.shape), name in buffers) for name, tensor in stored.items())


def described(name: str, shape: tuple[int, ...], is_buffer: bool = False) -> Tensor:
    """Return the tensor of this name on disk, with its place in the model."""
    layer, expert = _LAYER.search(name), _EXPERT.search(name)
    part: Part = "buffer" if is_buffer else _part(re.sub(r"\d+", "0", name)) or ("norm" if len(shape) == 1 else "unknown")
    return Tensor(name, shape, part, layer and int(layer[1]), expert and int(expert[1]))


@functools.cache
def _part(name: str) -> Part | None:
    """Return the part that a name says; None if it says none. Layers and experts have equal numbers, so few names differ."""
    return next((part for part, pattern in _PARTS if re.search(pattern, name)), None)
