"""Compare the tensors of a checkpoint with those of the model that its configuration describes.

Submission and both train backends use this comparison, so they refuse the same checkpoints. Imports torch and transformers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from pipeline.models.hugging_face import SCORE, checkpoint_shapes, meta_model
from pipeline.models.weight_files import FLOATS, TensorEntry
from pipeline.recipe.problems import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from pipeline.types import Head

DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # in old checkpoints; now computed from the config


def is_body(stored: Mapping[str, TensorEntry], head: Head) -> bool:
    """Return whether a checkpoint has no value head, so that a model with one takes its body from a language model."""
    return head == "values" and SCORE not in stored


def problems(
    key: str,
    name: str,
    stored: Mapping[str, TensorEntry],
    config: PreTrainedConfig,
    head: Head,
    body: bool,
    equal: Callable[[str, str], bool],
) -> Iterator[Problem]:
    """Yield a problem for each kind of difference between a checkpoint's tensors and those of the model.

    key: the recipe's key of the model. name: the checkpoint's name. config: of the model, with one label if the head gives
    values. body: the result of `is_body`. equal: a function that compares the bytes of two stored tensors.
    """
    shapes, tied = checkpoint_shapes(config, head)
    model = meta_model(config, "logprobs" if body else head)
    if body:
        theirs, tied = checkpoint_shapes(config)
        # The language model's head is not read, so it may be missing.
        shapes = {name: shape for name, shape in theirs.items() if name in shapes or name in stored}
    if packed := [f"{n} has dtype {stored[n].dtype}" for n in shapes if n in stored and stored[n].dtype not in FLOATS]:
        message = f"{name}: {packed[0]}; expected {', '.join(FLOATS)}. Is it quantized?"
        yield Problem(key, "unsupported", message)
    ignored = [DERIVED, *map(re.compile, model._keys_to_ignore_on_load_unexpected or ())]
    unknown = stored.keys() - shapes.keys() - tied.keys()
    stray = sorted(name for name in unknown if not any(pattern.search(name) for pattern in ignored))
    missing = sorted(shapes.keys() - stored.keys())
    if missing or stray:
        message = f"missing {missing[:4]} ({len(missing)}), unknown {stray[:4]} ({len(stray)})"
        message = f"the checkpoint {name} does not fit {type(model).__name__}: {message}"
        yield Problem(key, "unavailable-model", message)
    present = {name: (stored[name].shape, shape) for name, shape in shapes.items() if name in stored}
    if wrong := [f"{name} {on_disk} for {shape}" for name, (on_disk, shape) in present.items() if on_disk != shape]:
        message = f"shapes of the checkpoint {name} differ from the model's: {wrong[:4]}. Try the config.json of these weights"
        yield Problem(key, "unavailable-model", message)
    if packed or wrong:
        return  # the bytes of these tensors cannot be compared
    for alias, source in tied.items():
        if alias in stored and source in stored and not equal(alias, source):
            message = f"{alias} and {source} differ in the checkpoint {name}, but its configuration ties them"
            untied = f"{key.removesuffix('.model_name')}.hf_config_overrides.tie_word_embeddings=false"
            yield Problem(key, "unavailable-model", f"{message}. Try {untied}")
