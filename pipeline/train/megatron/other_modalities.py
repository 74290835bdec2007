"""The tensors for pictures and sound of a multimodal checkpoint: ranks hold them for refits, exports and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from math import prod

import torch

from pipeline.models.family import Parameter
from pipeline.models.precision import served_dtype
from pipeline.models.recorded_layout import Shape
from pipeline.models.text_model import OTHERS
from pipeline.train.megatron.groups import pipeline_group, tensor_group
from pipeline.train.megatron.model import PipelineStage


def hold(stage: PipelineStage, others: Mapping[str, Parameter], shapes: Mapping[str, Shape]) -> None:
    """Add this rank's share of these tensors to its stage, as parameters that do not train.

    The ranks of a data-parallel replica share them equally, as whole tensors. others: of `TextModel`. shapes: {name: shape} on
    disk.
    """
    stages, parts = pipeline_group(), tensor_group()
    rank, ranks = stages.rank() * parts.size() + parts.rank(), stages.size() * parts.size()
    ends = list(accumulate(prod(shapes[parameter.sources[0]]) for parameter in others.values()))
    like = next(stage.parameters())
    mine = torch.nn.ParameterDict()
    for (name, parameter), end in zip(others.items(), ends, strict=True):
        if (end - 1) * ranks // ends[-1] == rank:
            source = parameter.sources[0]
            dtype = served_dtype(source, like.dtype)
            empty = torch.empty(shapes[source], dtype=dtype, device=like.device)
            mine[name.removeprefix(f"{OTHERS}.")] = torch.nn.Parameter(empty, requires_grad=False)
    if mine:
        setattr(stage, OTHERS, mine)
