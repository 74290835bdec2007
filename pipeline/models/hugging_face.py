"""Hugging Face checkpoints: which tensors one holds, and how a transformers model lays them out in memory.

In memory transformers fuses some tensors (the experts of a layer); on disk they are apart, and everything that leaves or enters
a backend goes by those names on disk. Both come from transformers' own conversion of a model for saving, run on meta tensors:
no mapping is written here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pipeline.boxes import Piece
from pipeline.config import PolicyConfig
from pipeline.models.layout import Shape, invert, record_all

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def model_config(policy: PolicyConfig) -> PreTrainedConfig:
    """The policy's config with `hf_config_overrides`. Raises ValueError for an override that the config does not have."""
    from transformers import AutoConfig

    config, unused = AutoConfig.from_pretrained(
        policy.model_name, local_files_only=True, return_unused_kwargs=True, **policy.hf_config_overrides
    )
    if unused:
        raise ValueError(f"policy.hf_config_overrides: {', '.join(unused)} is not in the {config.model_type} configuration")
    return config


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model without memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def checkpoint_shapes(config: PreTrainedConfig) -> tuple[dict[str, Shape], dict[str, str]]:
    """The shape of every tensor that a checkpoint must hold, and {tied copy that it may hold besides: what it is a copy of}."""
    model = meta_model(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in on_disk(model, _state(model)).items()}
    return shapes, dict(model.all_tied_weights_keys)


def on_disk(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict of `model` as its checkpoint has it."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, state)


def layout(model: PreTrainedModel) -> dict[str, list[Piece]]:
    """For each tensor of the model, by its name in memory, of which whole tensors on disk it consists, and where they lie.

    Raises ValueError, naming the recipe's key, if it does not, or a tensor on disk is spread over several in memory.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in _state(model).items()}
    refusal = f"policy.model_name: {type(model).__name__} keeps tensors in memory that are not made of whole ones on disk"
    try:
        saved = record_all(lambda state: on_disk(model, state), shapes)
    except ValueError as error:
        raise ValueError(f"{refusal}: {error}") from error
    if spread := [name for name, (_, pieces) in saved.items() if len(pieces) != 1]:
        raise ValueError(f"{refusal}: {spread[0]}")
    pieces = invert({name: pieces for name, (_, pieces) in saved.items()})
    for name, shape in shapes.items():
        if sum(piece.target.numel for piece in pieces.get(name, ())) != math.prod(shape):
            raise ValueError(f"{refusal}: {name}")
    return pieces


def _state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Without tied copies."""
    return {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
