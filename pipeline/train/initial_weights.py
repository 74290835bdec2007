"""Read the initial weights of training from a Hugging Face checkpoint, or draw random weights under the same names.

Both backends read them here, so both start with the same weights and reject the same checkpoints. Only the value head on a
language model's body may be missing in a checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from pipeline.boxes import Box, whole
from pipeline.config import PolicyConfig, Problem, RecipeError, refuse
from pipeline.models import checkpoint_fit, quantized
from pipeline.models.hugging_face import SCORE, auto_model, checkpoint_shapes, meta_model, on_disk
from pipeline.models.stored_tensors import StoredTensors
from pipeline.models.weight_files import INDEX, SINGLE, WeightFiles, read_weight_files
from pipeline.train.shards import BoxReader
from pipeline.types import Head

logger = logging.getLogger(__name__)

ReadBox = Callable[[str, Box], torch.Tensor]
"""(name on disk, box) -> this box of the tensor, on the CPU."""

_SHOWN = 4  # files in a message


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
        model: PreTrainedModel = auto_model(head, config).from_config(config, dtype=torch.float32, trust_remote_code=False)
    weights = on_disk(model, model.state_dict())
    return lambda name, box: weights[name][box.within(whole(weights[name].shape))]


def _checkpoint(model_name: str, config: PreTrainedConfig, seed: int, head: Head) -> ReadBox:
    """Return a reader of the checkpoint's safetensors files, whose tensors have the names and shapes of the model.

    Quantized tensors are read in bfloat16. Tensors may have other names or be joined, where transformers loads these.
    """
    reader, files = BoxReader(), checkpoint_files(model_name).tensors
    for name, stored in files.items():
        reader.add(name, stored.shape, stored.path, whole(stored.shape))
    unpacked = quantized.unpacked(files)
    body = checkpoint_fit.is_body(unpacked, head)
    tensors = StoredTensors.of(meta_model(config, "logprobs" if body else head), unpacked)

    def read(name: str, box: Box) -> torch.Tensor:
        return tensors.read(name, box, lambda stored, of_it: quantized.read(stored, of_it, files, reader.read))

    def equal(*names: str) -> bool:
        return torch.equal(*(read(name, whole(tensors.entries[name].shape)) for name in names))

    refuse(checkpoint_fit.problems("policy.model_name", model_name, tensors.entries, config, head, body, equal))
    if not body:
        return read
    shape = checkpoint_shapes(config, head)[0][SCORE]
    score = torch.empty(shape).normal_(
        std=config.get_text_config().initializer_range, generator=torch.Generator().manual_seed(seed)
    )
    return lambda name, box: score[box.within(whole(shape))] if name == SCORE else read(name, box)


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
