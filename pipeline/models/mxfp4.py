"""Present checkpoints in MXFP4, as OpenAI publishes gpt-oss, as the bfloat16 tensors that they hold.

A tensor `X` [experts, inputs, outputs] is stored as `X_blocks` [experts, outputs, inputs / 32, 16], in which a byte holds two
numbers of 4 bits, and `X_scales` [experts, outputs, inputs / 32], an exponent for each 32 inputs (OCP Microscaling Formats,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf). All other tensors are stored plain.

Only `read` needs torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline.boxes import Box
from pipeline.models.weight_files import TensorEntry

if TYPE_CHECKING:
    import torch

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32  # inputs that share a scale


def is_used(quantization: Mapping[str, Any]) -> bool:
    """Return whether the `quantization_config` of a config.json is that of a checkpoint in MXFP4."""
    return quantization.get("quant_method") == "mxfp4"


def holds(name: str, files: Mapping[str, TensorEntry]) -> bool:
    """Return whether the stored tensors `files` have the tensor `name` in this format."""
    return name + SCALES in files


def unpacked(stored: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors of a checkpoint, with one tensor in bfloat16 for each pair of blocks and scales.

    Pairs whose shapes or dtypes do not fit each other stay as they are.
    """
    tensors = dict(stored)
    for name, blocks in stored.items():
        scales = stored.get(scales_of(name))
        if scales is None or (blocks.dtype, scales.dtype) != ("U8", "U8") or len(blocks.shape) != 4:
            continue
        if blocks.shape[:-1] == scales.shape and blocks.shape[-1] == BLOCK // 2:
            del tensors[name], tensors[scales_of(name)]
            experts, outputs, groups, _ = blocks.shape
            tensors[name.removesuffix(BLOCKS)] = replace(blocks, dtype="BF16", shape=(experts, groups * BLOCK, outputs))
    return tensors


def scales_of(blocks: str) -> str:
    """Return the name of the scales of a tensor of blocks; another name for any other tensor."""
    return blocks.removesuffix(BLOCKS) + SCALES


def read(name: str, box: Box, files: Mapping[str, TensorEntry], stored: Callable[[str, Box], torch.Tensor]) -> torch.Tensor:
    """Return a box of the bfloat16 tensor `name`, which transformers dequantizes from the blocks that hold this box.

    files: the stored tensors. stored: a function from (name of a stored tensor, box in it) to the tensor in this box.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # needs torch, which submission may lack

    (expert, start, output), (experts, inputs, outputs) = box.offset, box.size
    first, last = start // BLOCK, -(-(start + inputs) // BLOCK)
    groups = Box((expert, output, first), (experts, outputs, last - first))
    blocks = Box((*groups.offset, 0), (*groups.size, BLOCK // 2))
    whole_blocks = convert_moe_packed_tensors(stored(name + BLOCKS, blocks), stored(name + SCALES, groups))
    return whole_blocks[:, start - first * BLOCK :][:, :inputs]
