"""Hugging Face checkpoints: which tensors one holds, and how a transformers model lays them out in memory.

In memory transformers fuses some tensors (the experts of a layer); on disk they are apart, and everything that leaves or enters
a backend goes by those names on disk. Both come from transformers' own conversion of a model for saving, run on meta tensors:
no mapping is written here.

A model with the head "values" is transformers' sequence classifier with one label: the body, and `score.weight` [1, H] on it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from pipeline.boxes import Piece
from pipeline.config import PolicyConfig
from pipeline.models.base import SCORE
from pipeline.models.recorded_layout import Shape, invert, record_all

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from pipeline.types import Head


def model_config(policy: PolicyConfig, head: Head = "logprobs") -> PreTrainedConfig:
    """The policy's config with `hf_config_overrides`, and with one label if the head gives values.

    Raises ValueError for an override that the config does not have, for a sequence classifier with another number of labels,
    and for a family that has none.
    """
    from transformers import AutoConfig

    config, unused = AutoConfig.from_pretrained(
        policy.model_name, local_files_only=True, return_unused_kwargs=True, **policy.hf_config_overrides
    )
    if unused:
        raise ValueError(f"policy.hf_config_overrides: {', '.join(unused)} is not in the {config.model_type} configuration")
    if head == "values":
        _give_one_label(config, policy.model_name)
    return config


def _give_one_label(config: PreTrainedConfig, model_name: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"policy.model_name: {model_name} cannot have a value head: transformers has no sequence classifier for"
            f" {config.model_type}"
        )
    classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    if classifier and config.num_labels != 1:
        raise ValueError(
            f"policy.model_name: {model_name} is a sequence classifier with {config.num_labels} labels; a value head has 1"
        )
    config.num_labels = 1  # of a language model's configuration, transformers says 2
    config.architectures = [MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].__name__]


def auto_model(head: Head) -> type:
    """transformers' class that makes a model with this head from a config."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForCausalLM if head == "logprobs" else AutoModelForSequenceClassification


def meta_model(config: PreTrainedConfig, head: Head = "logprobs", **options: Any) -> PreTrainedModel:
    """The model without memory. options: of transformers' `from_config`. Raises ValueError if its value head is another than
    `score.weight`."""
    with torch.device("meta"):
        model = auto_model(head).from_config(config, **options)
    if head == "values":
        beyond = {name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}
        if beyond != {SCORE}:
            raise ValueError(
                f"policy.model_name: the value head of {type(model).__name__} is {', '.join(sorted(beyond))}, not {SCORE}"
            )
    return model


def checkpoint_shapes(config: PreTrainedConfig, head: Head = "logprobs") -> tuple[dict[str, Shape], dict[str, str]]:
    """The shape of every tensor that a checkpoint must hold, and {tied copy that it may hold besides: what it is a copy of}."""
    model = meta_model(config, head)
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
