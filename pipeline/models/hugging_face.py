"""Find the tensors of a Hugging Face checkpoint, and their layout in a transformers model.

transformers fuses some tensors in memory, such as the experts of a layer. On disk they are separate, and tensors that enter or
leave a backend have their names on disk. We run transformers' own conversion of a model for saving on meta tensors, and get
names and layouts from it, so this module has no mapping of its own.

A model with the head "values" is transformers' sequence classifier with one label: the body and `score.weight` [1, H].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
)

from pipeline.boxes import Piece
from pipeline.config import PolicyConfig, Problem, RecipeError
from pipeline.models import rope
from pipeline.models.config_overrides import overridden
from pipeline.models.config_values import ALIASES, MULTIMODAL
from pipeline.models.family import SCORE, unsupported_model
from pipeline.models.quantized import format_name
from pipeline.models.recorded_layout import Shape, invert, record_all

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from pipeline.types import Head


def model_config(policy: PolicyConfig, head: Head = "logprobs") -> PreTrainedConfig:
    """Return the policy's transformers config with `hf_config_overrides`, and with one label if the head gives values.

    Raises RecipeError for an override that the config does not have, for a sequence classifier with another number of labels,
    and for a family that has no sequence classifier.
    """
    config = _overridden(_file_config(policy), policy)
    if head == "values":
        give_one_label(config, policy.model_name)
    return config


def engine_overrides(policy: PolicyConfig) -> dict[str, Any] | Callable[[PreTrainedConfig], PreTrainedConfig]:
    """Return `hf_config_overrides` as the values that vLLM sets on the configuration from the model's config.json.

    vLLM sets values one by one, so the result has complete values for keys that depend on each other, such as those of RoPE.
    For a quantized checkpoint that ranks read in bfloat16 the result is a function, which changes a configuration into that of
    the dequantized model: vLLM chooses its loader by the attribute `quantization_config`, which values cannot remove.
    """
    base = _file_config(policy)
    changed = _difference(base.to_dict(), _overridden(base, policy).to_dict())
    plain = {name: value for name, value in policy.hf_config_overrides.items() if name not in rope.SPELLINGS}
    values = {**{name: value for name, value in plain.items() if not isinstance(value, dict)}, **changed}
    file, _ = type(base).get_config_dict(policy.model_name, local_files_only=True)
    return functools.partial(_dequantized, values) if format_name(file.get("quantization_config")) else values


def _dequantized(values: dict[str, Any], config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the dequantized model with these values, from vLLM's configuration of its checkpoint."""
    config.update(values)
    vars(config).pop("quantization_config", None)
    return config


def _difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the values of `after` that differ from those of `before`; for a sub-configuration, only its differences."""
    return {
        name: _difference(before[name], value) if name.endswith("_config") and isinstance(before.get(name), dict) else value
        for name, value in after.items()
        if before.get(name) != value and not (name.endswith("_config") and not isinstance(value, dict))
    }


def _file_config(policy: PolicyConfig) -> PreTrainedConfig:
    for alias, known in ALIASES.items():
        CONFIG_MAPPING.register(alias, CONFIG_MAPPING[known], exist_ok=True)
    found = AutoConfig.from_pretrained(policy.model_name, local_files_only=True, trust_remote_code=False)
    return _trained(found)


OTHER_PARTS = ("text_config", "vision_config", "audio_config", "quantization_config", MULTIMODAL)
"""Keys of config.json that do not describe the language model, or that are merged into its keys."""


def config_of(values: Mapping[str, Any], whole: bool = False) -> PreTrainedConfig:
    """Return transformers' configuration of a config.json. Of a multimodal model, `values` has the keys of its language model.

    whole: return the configuration of all parts of a multimodal model, not of its language model. Raises RecipeError for a
    family that transformers does not have, and for values that its configuration refuses.
    """
    left_out = OTHER_PARTS
    if whole and MULTIMODAL in values:
        values, left_out = values[MULTIMODAL], ("quantization_config",)
    kind = str(values.get("model_type"))
    kind = ALIASES.get(kind, kind)
    if kind not in CONFIG_MAPPING:
        raise unsupported_model(f"transformers {transformers.__version__} has no models of type '{kind}'")
    plain = {name: value for name, value in values.items() if name not in left_out}
    try:
        of = CONFIG_MAPPING[kind]
        return _trained(of.from_dict(of._decode_special_floats(plain)))  # as transformers reads the file
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        raise unsupported_model(f"transformers refuses this config.json of a {kind} model: {error}") from error


def _trained(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the model that is trained, from that of its checkpoint."""
    vars(config).pop("model_type", None)  # an alias from the file, which hides the class's
    if format_name(getattr(config, "quantization_config", None)):
        vars(config).pop("quantization_config")  # weights are read in bfloat16
    return config


def _overridden(base: PreTrainedConfig, policy: PolicyConfig) -> PreTrainedConfig:
    """Return a configuration of the class of `base`, from config.json with the recipe's overrides.

    Overrides are never arguments of `from_pretrained`, because some of its arguments choose files or code that it loads.
    """
    key, given = "policy.hf_config_overrides", policy.hf_config_overrides
    if not given:
        return base
    if unknown := [name for name in _dotted(given, base) if not _has(base, name)]:
        message = f"got {', '.join(unknown)}, which the {base.model_type} configuration does not have"
        raise RecipeError(Problem(key, "unknown-key", message))
    file, _ = type(base).get_config_dict(policy.model_name, local_files_only=True)
    merged = {**overridden(file, given, key), "name_or_path": policy.model_name}
    try:
        return _trained(type(base).from_dict(merged))
    except (KeyError, TypeError, ValueError) as error:
        message = f"got {given}, which the {base.model_type} configuration refuses: {error}"
        raise RecipeError(Problem(key, "bad-format", message)) from error


def _dotted(given: dict[str, Any], config: PreTrainedConfig) -> list[str]:
    """Return the names of overrides. Those in sub-configurations are dotted: `text_config.hidden_size`."""
    names = []
    for name, value in given.items():
        sub = getattr(config, name, None)
        nested = isinstance(value, dict) and hasattr(sub, "to_dict")
        names += [f"{name}.{inner}" for inner in _dotted(value, sub)] if nested else [name]  # pyright: ignore[reportArgumentType]
    return names


def _has(config: PreTrainedConfig, name: str) -> bool:
    """Return whether an override of this (dotted) name has a meaning: an attribute, or a spelling of RoPE."""
    *path, last = name.split(".")
    for part in path:
        config = getattr(config, part)
    spelled = last in rope.SPELLINGS and last != rope.LOCAL_THETA
    return (
        hasattr(config, last)
        or (spelled and hasattr(config, rope.PARAMETERS))
        or last in ("num_labels", "torch_dtype", rope.LOCAL_THETA)
    )


def give_one_label(config: PreTrainedConfig, model_name: str) -> None:
    """Make the configuration that of a sequence classifier with one label. Raises RecipeError as `model_config` does."""
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise unsupported_model(
            f"{model_name} cannot have a value head: transformers has no sequence classifier for {config.model_type}"
        )
    classifier = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
    if classifier and config.num_labels != 1:
        raise unsupported_model(
            f"{model_name} is a sequence classifier with {config.num_labels} labels; expected 1 label for a value head"
        )
    config.num_labels = 1  # transformers' default is 2
    # The mapping's annotation is its internal value type; it returns the model's class.
    config.architectures = [
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)].__name__  # pyright: ignore[reportAttributeAccessIssue]
    ]


def auto_model(head: Head, config: PreTrainedConfig) -> type:
    """Return transformers' auto class for models of this configuration with this head."""
    if head == "values":
        return AutoModelForSequenceClassification
    several = config.get_text_config() is not config  # some of these families have a model of text alone, with other names
    multimodal = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if several and multimodal else AutoModelForCausalLM


def language_model(model: PreTrainedModel) -> torch.nn.Module:
    """Return the body that computes text: the language model of a multimodal model, else the whole body."""
    return getattr(model.base_model, "language_model", model.base_model)


def other_modalities(model: PreTrainedModel) -> list[str]:
    """Return the names of the parameters for pictures and sound, which text neither uses nor trains."""
    text = {id(parameter) for parameter in language_model(model).parameters()}
    return [name for name, parameter in model.base_model.named_parameters(model.base_model_prefix) if id(parameter) not in text]


def meta_model(config: PreTrainedConfig, head: Head = "logprobs", **options: Any) -> PreTrainedModel:
    """Return the model on the meta device. options: keyword arguments of transformers' `from_config`.

    Raises RecipeError if the value head is not `score.weight` alone.
    """
    with torch.device("meta"):
        model = auto_model(head, config).from_config(config, trust_remote_code=False, **options)
    if head == "values":
        beyond = {name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")}
        if beyond != {SCORE}:
            found = ", ".join(sorted(beyond))
            raise unsupported_model(f"the value head of {type(model).__name__} is {found}; expected {SCORE}")
    return model


def checkpoint_shapes(config: PreTrainedConfig, head: Head = "logprobs") -> tuple[dict[str, Shape], dict[str, str]]:
    """Return ({tensor that a checkpoint must have: shape}, {tied copy that it may also have: the tensor that it copies})."""
    model = meta_model(config, head)
    shapes = {name: tuple(tensor.shape) for name, tensor in on_disk(model, state(model)).items()}
    return shapes, dict(model.all_tied_weights_keys)


def on_disk(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert a state dict of `model` to the names and shapes of its checkpoint.

    The parts of a multimodal model have the prefixes of published checkpoints (`vision_tower.vision_model.`), which vLLM needs.
    Of a model without a file, transformers would leave these prefixes out.
    """
    if getattr(model, "_weight_conversions", None) is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        prefixes = [conversion for conversion in conversions if isinstance(conversion, PrefixChange)]
        if nested := [conversion for conversion in prefixes if conversion.scope_prefix]:
            kept: Any = [conversion for conversion in conversions if conversion not in prefixes or conversion in nested]
            model._weight_conversions = kept  # where transformers keeps those of a file
    return revert_weight_conversion(model, state)


def layout(model: PreTrainedModel) -> dict[str, list[Piece]]:
    """Return {tensor in memory: the pieces of tensors on disk of which it consists}.

    Raises RecipeError if a tensor in memory does not consist of whole tensors on disk, or if a tensor on disk belongs to
    several tensors in memory.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in state(model).items()}
    refusal = f"{type(model).__name__} has tensors in memory that do not consist of whole tensors on disk"
    try:
        saved = record_all(lambda state: on_disk(model, state), shapes)
    except ValueError as error:
        raise unsupported_model(f"{refusal}: {error}") from error
    if spread := [name for name, (_, pieces) in saved.items() if len(pieces) != 1]:
        raise unsupported_model(f"{refusal}: {spread[0]}")
    pieces = invert({name: pieces for name, (_, pieces) in saved.items()})
    for name, shape in shapes.items():
        if sum(piece.target.numel for piece in pieces.get(name, ())) != math.prod(shape):
            raise unsupported_model(f"{refusal}: {name}")
    return pieces


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the model's state dict without tied copies."""
    return {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
