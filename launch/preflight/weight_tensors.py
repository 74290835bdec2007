"""Check that a checkpoint has the tensors of the model in its config.json: names, shapes, dtypes and tied copies.

Reads headers and a few kilobytes of tied copies. Imports torch and transformers. Leaves out quantized models, multimodal
models and other families; the job checks these first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pipeline import models
from pipeline.config import Problem
from pipeline.models.tensors import tensors
from pipeline.models.weight_files import FLOATS, TensorEntry, some

LM_HEAD, SCORE = "lm_head.weight", "score.weight"
Head = Literal["logprobs", "values", "rewards"]
CHECKED = (*models.FAMILIES, "ministral")
"""Families whose checkpoints have transformers' names. Of others the job compares the tensors."""
NOT_LOADED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)mtp\.|^model\.mtp")
"""Tensors that transformers ignores: derived tensors of old checkpoints, and layers for multi-token prediction."""
PREDICTING = ("deepseek_v3", "glm4_moe")  # families whose layers that predict several tokens follow the model's layers
PROBES, PROBE_BYTES = 64, 4096  # parts of tied copies that are compared


def problems(
    key: str, folder: Path, config: Mapping[str, Any], stored: Mapping[str, TensorEntry], head: Head
) -> Iterator[Problem]:
    """Yield a problem for each kind of difference between the stored tensors and those of the model in config.json.

    key: the recipe's key of the model's name. head: `logprobs` for a language model; `values` for a critic, whose checkpoint
    may lack the value head; `rewards` for a reward model, whose checkpoint must have its head.
    """
    if config.get("model_type") not in CHECKED or "text_config" in config or config.get("quantization_config"):
        return
    try:
        model_tensors = tensors(config)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):  # wrong sizes, which `architecture` reports
        return
    expected = {tensor.name: tensor.shape for tensor in model_tensors}
    embedding = next(tensor.name for tensor in model_tensors if tensor.part == "embedding")
    if head != "logprobs":
        expected.pop(LM_HEAD, None)
    if head == "rewards":
        expected[SCORE] = (1, config["hidden_size"])
    missing = [name for name in expected if name not in stored]
    valid_names = {*expected, LM_HEAD} if head == "logprobs" else {*expected, LM_HEAD, SCORE}
    unknown = [name for name in stored if name not in valid_names and _is_loaded(name, config)]
    if missing or unknown:
        faults = [f"has no {some(missing)}"] if missing else []
        faults += [f"has {some(unknown)}, which the model does not have"] if unknown else []
        yield Problem(key, "unavailable-model", f"{folder} does not fit its config.json: it {', and '.join(faults)}")
    named = {name: shape for name, shape in expected.items() if name in stored}
    if wrong := [
        f"{name} is {_shape(stored[name].shape)} and not {_shape(s)}" for name, s in named.items() if stored[name].shape != s
    ]:
        message = f"{folder}: shapes differ from config.json: {some(wrong)}. Try the config.json of these weights"
        yield Problem(key, "unavailable-model", message)
    if packed := [f"{name} ({stored[name].dtype})" for name in named if stored[name].dtype not in FLOATS]:
        message = f"{folder} has weights of unsupported data types, {some(packed)}; expected"
        yield Problem(key, "unsupported", f"{message} {', '.join(FLOATS)}")
    copied = LM_HEAD in stored and LM_HEAD not in expected and head == "logprobs" and embedding in stored
    if copied and not _look_equal(stored[LM_HEAD], stored[embedding]):
        message = f"{folder}: {LM_HEAD} and {embedding} differ, but config.json ties them"
        untied = f"{key.removesuffix('.model_name')}.hf_config_overrides.tie_word_embeddings=false"
        yield Problem(key, "unavailable-model", f"{message}. Try {untied}")


def _is_loaded(name: str, config: Mapping[str, Any]) -> bool:
    if NOT_LOADED.search(name):
        return False
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return not (layer and config["model_type"] in PREDICTING and int(layer[1]) >= config["num_hidden_layers"])


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _look_equal(a: TensorEntry, b: TensorEntry) -> bool:
    """Return whether two tensors have the same size and equal bytes in evenly spaced parts. The job compares all bytes."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    step = max(PROBE_BYTES, a.nbytes // PROBES)
    with open(a.path, "rb") as first, open(b.path, "rb") as second:
        for offset in range(0, a.nbytes, step):
            size = min(PROBE_BYTES, a.nbytes - offset)
            first.seek(a.start + offset)
            second.seek(b.start + offset)
            if first.read(size) != second.read(size):
                return False
    return True
