"""Compute the boxes that each rank of a vLLM engine receives: tensor, expert and pipeline parallelism.

Not supported: families whose parts in vLLM are not described here (`vllm_tables` names them).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from launch.plan.layout_tables import TableBuilder, consecutive, stages_of
from pipeline.boxes import whole
from pipeline.config import Problem, RecipeError, VLLMConfig
from pipeline.models.tensors import Part, Tensor, experts
from pipeline.refit.tables import LayoutTable

_MODEL = "policy.model_name"
_PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE: the vocabulary is padded to a multiple of it, then cut
_EVERYWHERE: dict[str, tuple[Part, ...]] = {  # tensors that vLLM's models have on every stage, besides the stage's layers
    "qwen3_moe": ("embedding", "norm", "output"),
    "mixtral": ("embedding", "norm", "output"),
    "gemma3_text": ("norm",),
}


class _TensorCut(NamedTuple):
    """The division of a tensor on disk over the ranks of a stage."""

    unit: str
    name: str
    dim: int = 0  # cut along this one
    parts: int = 1  # in so many
    step: int = 0  # of so many entries, the last ones shorter or empty
    owner: int = -1  # the one rank that has it; -1: all


def vllm_tables(of: SimpleNamespace, vllm: VLLMConfig, builder: TableBuilder) -> list[LayoutTable]:
    """Return the tables of an engine's ranks: rank = pipeline rank * tensor-parallel size + tensor-parallel rank."""
    if of.model_type in ("gpt_oss", "nemotron_h"):
        message = f"which parts of a '{of.model_type}' model vLLM's ranks have is not described"
        raise RecipeError(Problem(_MODEL, "unsupported", message))
    tensor, pipeline = vllm.tensor_parallel_size, vllm.pipeline_parallel_size
    layers, rest = divmod(of.num_hidden_layers, pipeline)
    # get_pp_indices of vllm/distributed/utils.py: what is left over goes to the stages before the last.
    stages = consecutive([layers + (pipeline - 1 - rest <= stage < pipeline - 1) for stage in range(pipeline)])
    cuts: list[list[_TensorCut]] = [[] for _ in stages]
    for one in builder.tensors:
        homes = stages_of(one.layer, one.part == "embedding", stages, of.tie_word_embeddings)
        if one.layer is None and one.part in _EVERYWHERE.get(of.model_type, ()):
            homes = range(pipeline)
        for stage in homes:
            cuts[stage].append(_vllm_cut(of, vllm, one))
    return [table for found in cuts for table in _vllm_tables(found, tensor, builder)]


def _vllm_tables(cuts: list[_TensorCut], size: int, builder: TableBuilder) -> list[LayoutTable]:
    """Return the tables of the ranks of one stage."""
    everything = builder.table((cut.unit, cut.name, whole(builder.shapes[cut.name])) for cut in cuts)
    dim, parts, step, owner = (np.array([getattr(cut, name) for cut in cuts]) for name in ("dim", "parts", "step", "owner"))
    found = []
    for rank in range(size):
        mine = np.flatnonzero((owner == -1) | (owner == rank))
        offset, extent = everything.offset[mine], everything.size[mine]
        rows = np.flatnonzero(parts[mine] > 1)
        own, along = mine[rows], dim[mine[rows]]
        length = extent[rows, along]
        start = np.minimum(rank * parts[own] // size * step[own], length)  # a part is on several ranks where there are too few
        offset[rows, along] = start
        extent[rows, along] = np.minimum(step[own], length - start)
        found.append(LayoutTable(everything.tensor[mine], offset, extent, everything.unit[mine], everything.units))
    return found


def _vllm_cut(of: SimpleNamespace, vllm: VLLMConfig, tensor: Tensor) -> _TensorCut:
    size, unit = vllm.tensor_parallel_size, _unit(of, tensor)
    if tensor.expert is not None and vllm.expert_parallel_size > 1:
        return _TensorCut(unit, tensor.name, owner=_place_of(tensor.expert, experts(of), size))
    if tensor.split == "none":
        return _TensorCut(unit, tensor.name)
    dim, parts = 1 if tensor.split == "columns" else 0, size
    length = tensor.shape[dim]
    if tensor.part in ("embedding", "output"):
        length = -(-length // _PADDING) * _PADDING
    elif tensor.name.rpartition(".")[0].endswith((".k_proj", ".v_proj")):
        parts = min(size, of.num_key_value_heads)
    if length % parts:
        message = f"{parts} does not divide dimension {dim} of {tensor.name}, which has {length} entries"
        raise RecipeError(Problem("policy.generation.vllm_cfg.tensor_parallel_size", "not-divisible", message))
    return _TensorCut(unit, tensor.name, dim, parts, length // parts)


def _place_of(expert: int, count: int, size: int) -> int:
    """Return the rank of an expert as vLLM's determine_expert_map does: consecutive ones, one more on the first ranks."""
    each, rest = divmod(count, size)
    return expert // (each + 1) if expert < rest * (each + 1) else rest + (expert - rest * (each + 1)) // each


def _unit(of: SimpleNamespace, tensor: Tensor) -> str:
    """Return the name of vLLM's module that holds the tensor."""
    module = tensor.name.rpartition(".")[0]
    parent, _, own = module.rpartition(".")
    latent = of.model_type == "deepseek_v3"
    if tensor.expert is not None:
        return f"{parent.rpartition('.')[0]}.routed_experts"
    if own in ("q_proj", "k_proj", "v_proj") and not latent:
        return f"{parent}.qkv_proj"
    if own in ("gate_proj", "up_proj"):
        return f"{parent}.gate_up_proj"
    if own in ("q_a_proj", "kv_a_proj_with_mqa") and of.q_lora_rank is not None:
        return f"{parent}.fused_qkv_a_proj"
    return module
