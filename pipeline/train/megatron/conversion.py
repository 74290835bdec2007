"""The one-time conversion of a Hugging Face checkpoint to whole Megatron parameters, in a folder that jobs share.

Only the train realm takes part. Its ranks divide the parameters between them and convert one at a time, so that a rank's memory
is bounded by the largest parameter (its sources and what is made of them), not by the model. Where conversions lie and how jobs
keep out of each other's way: `shelf.py`. What makes two checkpoints the same one: `fingerprint.py`.

Left out: quantised checkpoints, and conversions for a layout; these are whole parameters, of which each rank reads its boxes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import constants
from transformers import PreTrainedConfig

from pipeline.config import PolicyConfig
from pipeline.models import family
from pipeline.models.base import Parameter
from pipeline.train.megatron.fingerprint import content_digests, fingerprint
from pipeline.train.megatron.sharing import first, share
from pipeline.train.megatron.shelf import VARIABLE, Conversion, Shelf, unusable
from pipeline.train.megatron.streaming import StoredTensor, stored_tensors, write_tensors


def shared_folder() -> Path:
    """Where conversions are kept, by the environment."""
    for variable in (VARIABLE, "NRL_MEGATRON_CHECKPOINT_DIR"):
        if value := os.environ.get(variable):
            return Path(value).expanduser()
    return Path(constants.HF_HOME) / "hetstep"  # ~/.cache/huggingface, unless HF_HOME or XDG_CACHE_HOME say otherwise


def converted(
    policy: PolicyConfig,
    config: PreTrainedConfig,
    group: dist.ProcessGroup,
    folder: Path | None = None,
    timeout_s: float = 3600.0,
) -> Conversion:
    """The conversion of the checkpoint `policy.model_name`, made now if there is none. Collective over the train realm.

    config: the checkpoint's, with the recipe's overrides. folder: None for `shared_folder()`; all ranks must see it.
    timeout_s: how long to wait for another job that converts the same checkpoint.

    Raises ValueError, naming the recipe's key or the environment's variable, if the checkpoint is not of this model or the
    folder cannot be used; TimeoutError if another job's conversion does not end.
    """
    if getattr(config, "quantization_config", None):
        raise ValueError(f"policy.model_name: {policy.model_name} is quantised; training needs a checkpoint that is not")
    root = folder or shared_folder()
    first(group, lambda: _prepare(root))
    files = _safetensors(policy.model_name)
    digests = content_digests(files, root / "digests", group)
    parameters = family(config).parameters(config)
    work = _Conversion(policy, config, root, files, digests)
    with contextlib.ExitStack() as lock:
        chosen = json.loads(first(group, lambda: work.choose(lock, timeout_s)))
        if "partial" in chosen:
            share(group, lambda: work.convert(Path(chosen["partial"]), group))
