"""Present checkpoints in FP8 with a scale for each block, as DeepSeek, Moonshot and MiniMax publish them, in bfloat16.

A matrix `X.weight` [rows, columns] is stored as F8_E4M3 with `X.weight_scale_inv` [rows / 128, columns / 128], rounded up, in
float32: the factor of each block (https://arxiv.org/abs/2412.19437, section 3.3.2, and `weight_dequant` in DeepSeek-V3's
inference/kernel.py). All other tensors are stored plain.

Only `read` needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.boxes import Box
from pipeline.models.weight_files import FLOATS, TensorEntry

if TYPE_CHECKING:
    import torch

SCALES = "_scale_inv"
BLOCK = 128  # rows, and columns, that share a scale


def is_used(quantization: Mapping[str, Any]) -> bool:
    """Return whether the `quantization_config` of a config.json is that of a checkpoint in such blocks."""
    return quantization.get("quant_method") == "fp8" and list(quantization.get("weight_block_size") or ()) == [BLOCK, BLOCK]


def holds(name: str, files: Mapping[str, TensorEntry]) -> bool:
    """Return whether the stored tensors `files` have the tensor `name` in this format."""
    scales = files.get(name + SCALES)
    return scales is not None and files[name].dtype == "F8_E4M3" and scales.dtype in FLOATS and len(scales.shape) == 2


def unpacked(stored: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors of a checkpoint, with one tensor in bfloat16 for each matrix and its scales.

    Pairs whose shapes or dtypes do not fit each other stay as they are.
    """
    tensors = dict(stored)
    for name, matrix in stored.items():
        if holds(name, stored) and stored[name + SCALES].shape == tuple(-(-size // BLOCK) for size in matrix.shape):
            del tensors[name + SCALES]
            tensors[name] = replace(matrix, dtype="BF16")
    return tensors


def read(name: str, box: Box, files: Mapping[str, TensorEntry], stored: Callable[[str, Box], torch.Tensor]) -> torch.Tensor:
    """Return a box of the bfloat16 matrix `name`. Factors are multiplied in float32 and rounded once.

    files: the stored tensors. stored: a function from (name of a stored tensor, box in it) to the tensor in this box.
    """
    import torch  # which submission may lack

    ends = [start + size for start, size in zip(box.offset, box.size, strict=True)]
    first = tuple(start // BLOCK for start in box.offset)
    blocks = Box(first, tuple(-(-end // BLOCK) - start for start, end in zip(first, ends, strict=True)))
    scales = stored(name + SCALES, blocks).float()
    for dimension, (start, end) in enumerate(zip(box.offset, ends, strict=True)):
        scales = scales.index_select(dimension, torch.arange(start, end) // BLOCK - first[dimension])
    return (stored(name, box).float() * scales).bfloat16()
