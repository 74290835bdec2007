"""Describe how FSDP2's tensor parallelism cuts each tensor, as `pipeline/train/tensor_parallel.py` cuts transformers' modules.

Most tensors are cut as their description in `pipeline.models.tensors` says. There are three exceptions. The rows of a joint
projection are cut as one block, although the description says to cut each half. Latent attention and state spaces are whole on
every rank. Delta nets are whole with sequence parallelism; without it, their projections are cut by rows, and their other
tensors are whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from launch.plan.rank_division import Parallelism
from pipeline.models.family import Split
from pipeline.models.shape import ModelShape
from pipeline.models.tensors import Tensor

_STATE_SPACE = re.compile(r"\.mixer\.(in_proj|out_proj|conv1d|norm|A_log|D|dt_bias)(\.|$)")
_DELTA_NET = re.compile(r"\.linear_attn\.")
_PROJECTION = re.compile(r"_proj\w*(\.lora_B)?\.weight$")  # A of a layer that is cut by rows is whole


def fsdp_splits(tensors: Iterable[Tensor], sequence: bool) -> list[Split]:
    """Return how tensor parallelism cuts each tensor of a model or of its adapters: by "rows", by "columns" or "none".

    sequence: whether sequence parallelism is on. For routed experts, which tensor parallelism does not cut, the result repeats
    the split of their description.
    """
    tensors = list(tensors)
    latent = any("kv_a_proj" in tensor.name for tensor in tensors)
    return [_split(tensor, latent, sequence) for tensor in tensors]


def _split(tensor: Tensor, latent: bool, sequence: bool) -> Split:
    if _STATE_SPACE.search(tensor.name) or (latent and tensor.part == "attention"):
        return "none"
    if _DELTA_NET.search(tensor.name):
        return "rows" if not sequence and _PROJECTION.search(tensor.name) else "none"
    if tensor.split == "halves":
        return "rows"
    return tensor.split if tensor.split in ("rows", "columns") else "none"


def numel_of_rank(tensors: Iterable[Tensor], layout: Parallelism) -> float:
    """Return how many parameters of these tensors a tensor-parallel rank holds, without routed experts."""
    tensors = list(tensors)
    splits = zip(tensors, fsdp_splits(tensors, layout.sequence), strict=True)
    return sum(tensor.numel / (1 if split == "none" else layout.tensor) for tensor, split in splits if tensor.part != "routed")


def whole_mixers(shape: ModelShape, layout: Parallelism) -> int:
    """Return the number of parameters of attention and other mixers that tensor parallelism leaves whole on every rank."""
    splits = zip(shape.tensors, fsdp_splits(shape.tensors, layout.sequence), strict=True)
    return sum(tensor.numel for tensor, split in splits if tensor.part == "attention" and split == "none")
