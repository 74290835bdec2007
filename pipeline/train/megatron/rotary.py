"""Rotary embeddings of a Megatron-Core model, with the frequencies that transformers derives from the config."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typing_extensions import override

from pipeline.models.family import Features, unsupported_model


def rotary(hf: PreTrainedConfig, layer_type: str | None = None) -> tuple[torch.Tensor, float]:
    """Return (inverse frequencies [R / 2] float32, factor on queries and on keys), as transformers derives them.

    R: the number of rotated entries of each head, which are its first entries. layer_type: a key of rope_parameters, if layers
    differ.
    """
    parameters = hf.rope_parameters if layer_type is None else hf.rope_parameters[layer_type]
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"), layer_type=layer_type)
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
    """Rotary embeddings of several kinds. It returns the angles [kinds, s, 1, 1, R], of which a layer takes its kind's."""

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
        return torch.stack([embedding(*arguments, **named) for embedding in self._kinds])


def rotary_kinds(features: Features) -> list[str]:
    """Return the kinds of rotary embeddings of a model whose layers differ, in the order of `LayerRotary`."""
    return sorted(set(features.layer_rotary or ()))
