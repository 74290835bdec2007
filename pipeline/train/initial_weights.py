"""Read the initial weights of training from a Hugging Face checkpoint, or draw random weights under the same names.

Both backends read them here, so both start with the same weights and reject the same checkpoints. Only the value head on a
language model's body may be missing in a checkpoint.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from pipeline.boxes import Box, whole
from pipeline.config import PolicyConfig, Problem, RecipeError
from pipeline.models.hugging_face import SCORE, auto_model, checkpoint_shapes, meta_model, on_disk
from pipeline.models.weight_files import FLOATS, INDEX, SINGLE, WeightFiles, read_weight_files
from pipeline.train.shards import BoxReader
from pipeline.types import Head

logger = logging.getLogger(__name__)

ReadBox = Callable[[str, Box], torch.Tensor]
"""(name on disk, box) -> this box of the tensor, on the CPU."""

_SHOWN = 4  # files in a message
_DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # in old checkpoints; now computed from the config


def initial_weights(policy: PolicyConfig, config: PreTrainedConfig, seed: int, head: Head = "logprobs") -> ReadBox:
    """Return a reader of the checkpoint `policy.model_name`, or, with `policy.random_init`, of transformers' random weights.

    config: the checkpoint's configuration with the recipe's overrides. seed: for random weights, and for a value head on the
    body of a language model's checkpoint. Raises RecipeError if the checkpoint does not fit this model.
    """
    return _random(config, seed, head) if policy.random_init else _checkpoint(policy.model_name, config, seed, head)


def _random(config: PreTrainedConfig, seed: int, head: Head) -> ReadBox:
    """Return a reader of random weights. Each rank draws the whole model, so the weights are the same for every layout."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        model: PreTrainedModel = auto_model(head).from_config(config, dtype=torch.float32, trust_remote_code=False)
    weights = on_disk(model, model.state_dict())
    return lambda name, box: weights[name][box.within(whole(weights[name].shape))]


def _checkpoint(model_name: str, config: PreTrainedConfig, seed: int, head: Head) -> ReadBox:
    """Return a reader of the checkpoint's safetensors files, whose tensors have the names and shapes of the model."""
    reader, tensors = BoxReader(), checkpoint_files(model_name).tensors
    for name, stored in tensors.items():
        reader.add(name, stored.shape, stored.path, whole(stored.shape))
    shapes, tied = checkpoint_shapes(config, head)
    if quantized := next((name for name in shapes if name in tensors and tensors[name].dtype not in FLOATS), None):
        message = f"{quantized} has dtype {tensors[quantized].dtype}; expected {', '.join(FLOATS)}. Is it quantized?"
        raise _mismatch(f"{model_name}: {message}")
    if head == "logprobs" or SCORE in reader.shapes:
        _check(reader, model_name, meta_model(config, head), shapes, tied)
        return reader.read
    language_model = meta_model(config)
    theirs, tied = checkpoint_shapes(config)
    # The language model's head is not read, so it may be missing.
    absent = theirs.keys() - shapes.keys() - reader.shapes.keys()
    _check(reader, model_name, language_model, {n: shape for n, shape in theirs.items() if n not in absent}, tied)
    score = torch.empty(shapes[SCORE]).normal_(
        std=config.get_text_config().initializer_range, generator=torch.Generator().manual_seed(seed)
    )
    return lambda name, box: score[box.within(whole(shapes[SCORE]))] if name == SCORE else reader.read(name, box)


def _check(
    reader: BoxReader, model_name: str, model: PreTrainedModel, shapes: dict[str, tuple[int, ...]], tied: dict[str, str]
) -> None:
    """Raise RecipeError if the files do not have this model's tensors. shapes, tied: see `checkpoint_shapes`."""
    ignored = [_DERIVED, *map(re.compile, model._keys_to_ignore_on_load_unexpected or ())]
    unknown = reader.shapes.keys() - shapes.keys() - tied.keys()
    stray = sorted(name for name in unknown if not any(pattern.search(name) for pattern in ignored))
    missing = sorted(shapes.keys() - reader.shapes.keys())
    if missing or stray:
        raise _mismatch(
            f"the checkpoint {model_name} does not fit {type(model).__name__}:"
            f" missing {missing[:4]} ({len(missing)}), unknown {stray[:4]} ({len(stray)})"
        )
    if wrong := [f"{n} {reader.shapes[n]} for {shape}" for n, shape in shapes.items() if reader.shapes[n] != shape]:
        raise _mismatch(f"shapes of the checkpoint {model_name} differ from the model's: {wrong[:4]}")
    for alias, name in tied.items():
        if alias in reader.shapes and not torch.equal(*(reader.read(n, whole(reader.shapes[n])) for n in (alias, name))):
            raise _mismatch(
                f"{alias} and {name} differ in the checkpoint {model_name}, but its configuration ties them."
                " Try policy.hf_config_overrides.tie_word_embeddings=false"
            )


def _mismatch(message: str) -> RecipeError:
    return RecipeError(Problem("policy.model_name", "unavailable-model", message))


def checkpoint_files(model_name: str) -> WeightFiles:
    """Return the weights of a folder or of a cached Hugging Face model. Raises RecipeError if there are none, or not all."""
    config = cached_file(model_name, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False)
    files = WeightFiles() if config is None else read_weight_files(Path(config).parent)
    if not files.files and not files.faults:
        raise _mismatch(f"{model_name} has neither {SINGLE} nor {INDEX}. Try to download it first")
    if files.faults:
        raise _mismatch("; ".join(f"{model_name}: {name} {fault}" for name, fault in list(files.faults.items())[:_SHOWN]))
    for note in files.notes:
        logger.warning("%s: %s", model_name, note)
    return files
