"""Present checkpoints in FP8 with one scale for each matrix, as Mistral publishes Medium 3.5, in bfloat16.

A matrix `X.weight` is stored as F8_E4M3 with `X.weight_scale_inv`, its factor, which has one entry; `X.activation_scale` is for
kernels that compute in FP8, and is left out. (transformers/integrations/finegrained_fp8.py, activation_scheme static.)

Only `read` needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.boxes import Box, whole
from pipeline.models.weight_files import FLOATS, TensorEntry

if TYPE_CHECKING:
    import torch

WEIGHT, SCALE, ACTIVATIONS = "weight", "_scale_inv", "activation_scale"


def is_used(quantization: Mapping[str, Any]) -> bool:
    """Return whether the `quantization_config` of a config.json is that of a checkpoint with one scale for each matrix."""
    return quantization.get("quant_method") == "fp8" and quantization.get("weight_block_size") is None


def holds(name: str, files: Mapping[str, TensorEntry]) -> bool:
    """Return whether the stored tensors `files` have the tensor `name` in this format."""
    scale = files.get(name + SCALE)
    return scale is not None and files[name].dtype == "F8_E4M3" and scale.dtype in FLOATS and len(scale.shape) < 2


def unpacked(stored: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors of a checkpoint, with one tensor in bfloat16 for each matrix and its scale.

    Pairs that do not fit each other stay as they are.
    """
    tensors = dict(stored)
    for name, matrix in stored.items():
        if holds(name, stored) and math.prod(stored[name + SCALE].shape) == 1:
            del tensors[name + SCALE]
            tensors.pop(name.removesuffix(WEIGHT) + ACTIVATIONS, None)
            tensors[name] = replace(matrix, dtype="BF16")
    return tensors


def read(name: str, box: Box, files: Mapping[str, TensorEntry], stored: Callable[[str, Box], torch.Tensor]) -> torch.Tensor:
    """Return a box of the bfloat16 matrix `name`. The factor is multiplied in float32, and the product rounded once.

    files: the stored tensors. stored: a function from (name of a stored tensor, box in it) to the tensor in this box.
    """
    scale = stored(name + SCALE, whole(files[name + SCALE].shape))
    return (stored(name, box).float() * scale.float().reshape(())).bfloat16()
