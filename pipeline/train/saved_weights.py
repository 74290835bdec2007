"""Read a whole model, one tensor at a time, from a checkpoint of a run or from its own files, without ranks or a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from pipeline.boxes import whole
from pipeline.config import PolicyConfig
from pipeline.files.stored_files import FileKey
from pipeline.models.hugging_face import checkpoint_shapes, meta_model, model_config
from pipeline.models.precision import served_dtype
from pipeline.train.adapters.checkpoint_adapters import SavedAdapters
from pipeline.train.checkpoint_state import other_model
from pipeline.train.initial_weights import initial_weights
from pipeline.train.shards import read_shards
from pipeline.types import Head

Weights = Iterator[tuple[str, torch.Tensor]]
"""Yields (name on disk, tensor on the CPU in the precision in which engines serve it), in the order of a checkpoint."""


def model_weights(policy: PolicyConfig, seed: int, head: Head = "logprobs") -> Weights:
    """Return the weights of policy.model_name or, with policy.random_init, random weights.

    Raises RecipeError if the files are not of this model.
    """
    config = model_config(policy, head)
    shapes, _ = checkpoint_shapes(config, head)
    read = initial_weights(policy, config, seed, head)
    return ((name, read(name, whole(shapes[name])).to(_dtype(name, policy))) for name in shapes)


def checkpoint_weights(checkpoint: Path, policy: PolicyConfig, head: Head = "logprobs", key: FileKey | None = None) -> Weights:
    """Return the weights in `checkpoint`, which any backend saved with any layout. Adapters are merged.

    key: decrypts an encrypted checkpoint. Raises RecipeError if the checkpoint's model is not policy.model_name, or if the
    checkpoint is encrypted with another key.
    """
    reader, records = read_shards(checkpoint, key)
    config = model_config(policy, head)
    shapes, _ = checkpoint_shapes(config, head)
    stored = {name.removeprefix("model."): shape for name, shape in reader.shapes.items() if name.startswith("model.")}
    record = records[0].get("lora")
    adapters = SavedAdapters(reader, record, meta_model(config, head)) if record else None
    adapted = adapters.weights(shapes) if adapters else {}
    tensors = stored | adapted
    expected = {name: shapes.get(name) for name in tensors} if adapters else shapes  # other weights are policy.model_name's
    if tensors != expected:
        raise other_model(checkpoint, tensors, expected)
    base = initial_weights(policy, config, record["random_seed"] or 0, head) if record else None

    def weight(name: str) -> torch.Tensor:
        box, dtype = whole(shapes[name]), _dtype(name, policy)
        if name in stored or base is None or adapters is None:
            return reader.read(f"model.{name}", box).to(dtype)
        unmerged = base(name, box).to(dtype)
        return adapters.merged(name, unmerged) if name in adapted else unmerged

    return ((name, weight(name)) for name in shapes)


def _dtype(name: str, policy: PolicyConfig) -> torch.dtype:
    return served_dtype(name, getattr(torch, policy.precision))
