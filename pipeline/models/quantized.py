"""Read quantized checkpoints in bfloat16, for the formats in which models are published for training.

Ranks, engines, evaluations and exports then know tensors in bfloat16 alone. Submission refuses other formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.boxes import Box
from pipeline.models import fp8_blocks, fp8_tensors, mxfp4
from pipeline.models.weight_files import TensorEntry

if TYPE_CHECKING:
    import torch

FORMATS = {"MXFP4": mxfp4, f"FP8 in blocks of {fp8_blocks.BLOCK}": fp8_blocks, "FP8 with a scale per matrix": fp8_tensors}


def format_name(quantization: Mapping[str, Any] | None) -> str | None:
    """Return the name of the format of a config.json's `quantization_config`; None if it is not one of FORMATS."""
    return next((name for name, of in FORMATS.items() if quantization and of.is_used(quantization)), None)


def unpacked(stored: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the tensors of a checkpoint, in bfloat16 where it has them quantized in one of FORMATS.

    The file, start and nbytes of such a tensor are those of its quantized values.
    """
    tensors = dict(stored)
    for of in FORMATS.values():
        tensors = of.unpacked(tensors)
    return tensors


def read(name: str, box: Box, files: Mapping[str, TensorEntry], stored: Callable[[str, Box], torch.Tensor]) -> torch.Tensor:
    """Return a box of a tensor of `unpacked`.

    files: the tensors of the checkpoint as they are stored. stored: a function from (name of a stored tensor, box in it) to the
    tensor in this box.
    """
    of = next((of for of in FORMATS.values() if of.holds(name, files)), None)
    return of.read(name, box, files, stored) if of else stored(name, box)
