"""Map each tensor of this rank's pipeline stage to Hugging Face tensors.

The stage's names count layers and experts from this rank's first one, and differ with TransformerEngine (norms fused into the
next layer, grouped experts). `global_name` returns the names that a family's description (`pipeline/models`) uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import parallel_state

from pipeline.boxes import Piece
from pipeline.models.family import Parameter, unsupported_model
from pipeline.models.recorded_layout import Shape, cut_after, record
from pipeline.train.megatron.model import PipelineStage

_ENGINE_NAMES = {  # TransformerEngine's name -> the local modules' name
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A tensor of this rank's stage."""

    tensor: torch.Tensor  # a parameter, or a buffer that checkpoints hold
    hugging_face: list[Piece]  # its pieces of Hugging Face tensors
    cut: bool  # whether tensor-parallel ranks have different parts; if not, all have the whole
    expert: bool  # whether the tensor-parallel ranks are those of experts
    first: bool  # whether no rank before this one, of this data-parallel rank, has the same elements


def local_tensors(
    stage: PipelineStage, parameters: Mapping[str, Parameter], shapes: Mapping[str, Shape]
) -> dict[str, LocalTensor]:
    """Return the stage's tensors by global Megatron name.

    parameters: {global name: parameter} as the model's family describes them. shapes: {name: shape} of the Hugging Face tensors
    on disk. Raises RecipeError if the stage has a tensor that the family does not describe, or describes with another shape.
    """
    tensors = {}
    for name, tensor in _tensors(stage):
        parameter = parameters.get(name)
        if parameter is None:
            raise unsupported_model(f"Megatron-Core's model has {name}, which the model's family does not describe")
        sources = [(source, tuple(shapes[source])) for source in parameter.sources]
        tensors[name] = _local(name, tensor, parameter, sources, stage.pre_process)
    return tensors


def _local(
    name: str, tensor: torch.Tensor, parameter: Parameter, sources: list[tuple[str, Shape]], first_stage: bool
) -> LocalTensor:
    rank, size = _tensor_rank_and_size(parameter)
    shape, _ = record(parameter.function, sources)
    vocabulary = name in ("embedding.word_embeddings.weight", "output_layer.weight")
    rows = -(-shape[0] // size) * size if vocabulary else shape[0]
    # Some modules (MLA's down-projections) are whole on every rank in one spec of Megatron-Core and cut in another.
    split = "none" if tuple(tensor.shape) == shape else parameter.split
    locals_, pieces = record(cut_after(partial(_pad_rows, parameter.function, rows), split, rank, size), sources)
    if locals_ != tuple(tensor.shape):
        shape = tuple(tensor.shape)
        raise unsupported_model(f"{name} has shape {shape} in Megatron-Core's model; its family describes {locals_}")
    cut = split != "none" and size > 1
    first = (cut or rank == 0) and (first_stage or name != "embedding.word_embeddings.weight")  # the last stage may tie it
    return LocalTensor(tensor, pieces, cut, parameter.expert is not None, first)


def _pad_rows(function, rows: int, *sources: torch.Tensor) -> torch.Tensor:
    tensor = function(*sources)
    missing = rows - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def _tensor_rank_and_size(parameter: Parameter) -> tuple[int, int]:
    if parameter.expert is not None:
        rank, size = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    else:
        rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
    assert rank is not None and size is not None  # after `groups.initialize`
    return rank, size


def _tensors(stage: PipelineStage) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, and buffers that checkpoints contain (a router's bias), by global name."""
    persistent = stage.state_dict(keep_vars=True).keys()
    for name, tensor in stage.named_parameters():
        yield global_name(stage, name), tensor
    for name, tensor in stage.named_buffers():
        if name in persistent and tensor is not None and name.endswith("expert_bias"):
            yield global_name(stage, name), tensor


def global_name(stage: PipelineStage, name: str) -> str:
    """Return the global name of a stage's tensor: its name without pipeline and expert parallelism and TransformerEngine.

    name: its name in this rank's stage.
    """
    if name == "output_layer.weight" and stage.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if not match:
        return name
    layer = int(stage.decoder.layers[int(match[1])].layer_number) - 1  # pyright: ignore[reportArgumentType] - int, from 1
    suffix = _ENGINE_NAMES.get(match[2], match[2])
    first = _first_expert(stage)
    suffix = re.sub(r"local_experts\.(\d+)", lambda m: f"local_experts.{int(m[1]) + first}", suffix)
    suffix = re.sub(
        r"mlp\.experts\.(linear_fc\d)\.(weight|bias)(\d+)",
        lambda m: f"mlp.experts.local_experts.{int(m[3]) + first}.{m[1]}.{m[2]}",
        suffix,
    )
    return f"decoder.layers.{layer}.{suffix}"


def _first_expert(stage: PipelineStage) -> int:
    experts = stage.config.num_moe_experts
    if not experts:
        return 0
    return parallel_state.get_expert_model_parallel_rank() * experts // parallel_state.get_expert_model_parallel_world_size()
