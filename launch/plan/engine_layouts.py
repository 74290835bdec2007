"""Compute the boxes that each rank of a vLLM engine receives with tensor, expert and pipeline parallelism."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from pipeline.models.sizes import QWEN3_5

from launch.plan.layout_tables import TableBuilder, consecutive, stages_of
from pipeline.boxes import Box, whole
from pipeline.config import Problem, RecipeError, VLLMConfig
from pipeline.models.tensors import Part, Tensor, experts
from pipeline.refit.tables import LayoutTable

_SIZE = "policy.generation.vllm_cfg.tensor_parallel_size"
_PADDING = 64
"""vLLM's DEFAULT_VOCAB_PADDING_SIZE: the vocabulary is padded to a multiple of it, then cut
(vllm/model_executor/layers/vocab_parallel_embedding.py)."""
_EVERYWHERE: dict[str, tuple[Part, ...]] = {  # tensors that vLLM's models have on every stage, besides the stage's layers
    "qwen3_moe": ("embedding", "norm", "output"),
    "mixtral": ("embedding", "norm", "output"),
    "gemma3_text": ("norm",),
    "gpt_oss": ("embedding", "norm", "output"),
    "nemotron_h": ("embedding", "norm", "output"),
    **dict.fromkeys(QWEN3_5, ("embedding",)),
}
_RENAMED: dict[str, dict[str, str]] = {  # parts of the names of modules on disk -> in vLLM
    "gpt_oss": {".self_attn": ".attn", ".embed_tokens": ".embedding"},
    "nemotron_h": {"backbone.": "model.", ".embeddings": ".embed_tokens"},
}
_JOINED = {"in_proj_qkv": "in_proj_qkvz", "in_proj_z": "in_proj_qkvz", "in_proj_b": "in_proj_ba", "in_proj_a": "in_proj_ba"}
"""Projections of a delta net on disk -> the module of vLLM that joins them."""
_STACKED = {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1, "down_proj_bias": -1}
"""gpt_oss's tensors that stack all experts -> the dimension that tensor parallelism cuts; -1: only the first rank has it."""


class _TensorCut(NamedTuple):
    """The division of a tensor on disk, or of a part of it, over the ranks of a pipeline stage."""

    unit: str
    name: str
    dim: int = 0  # cut along this one
    parts: int = 1  # in so many
    step: int = 0  # of so many entries, the last ones shorter or empty
    owner: int = -1  # the one rank that has it; -1: all
    box: Box | None = None  # of this part of the tensor; None: of the whole tensor


def engine_stages(layers: int, pipeline: int) -> list[range]:
    """Return the layers of each pipeline stage of a vLLM engine."""
    layers_per_stage, remainder = divmod(layers, pipeline)
    # get_pp_indices of vllm/distributed/utils.py: what is left over goes to the stages before the last.
    return consecutive([layers_per_stage + (pipeline - 1 - remainder <= stage < pipeline - 1) for stage in range(pipeline)])


def vllm_tables(of: SimpleNamespace, vllm: VLLMConfig, builder: TableBuilder) -> list[LayoutTable]:
    """Return the tables of an engine's ranks, numbered pipeline rank * tensor-parallel size + tensor-parallel rank."""
    tensor, pipeline = vllm.tensor_parallel_size, vllm.pipeline_parallel_size
    stages = engine_stages(of.num_hidden_layers, pipeline)
    cuts: list[list[_TensorCut]] = [[] for _ in stages]
    for model_tensor in builder.tensors:
        homes = stages_of(model_tensor.layer, model_tensor.part == "embedding", stages, of.tie_word_embeddings)
        if model_tensor.layer is None and model_tensor.part in _EVERYWHERE.get(of.model_type, ()):
            homes = range(pipeline)
        for stage in homes:
            cuts[stage] += _cuts(of, vllm, model_tensor)
    return [table for stage_cuts in cuts for table in _vllm_tables(stage_cuts, tensor, builder)]


def _vllm_tables(cuts: list[_TensorCut], size: int, builder: TableBuilder) -> list[LayoutTable]:
    """Return the tables of the `size` tensor-parallel ranks of one pipeline stage."""
    everything = builder.table((cut.unit, cut.name, cut.box or whole(builder.shapes[cut.name])) for cut in cuts)
    dim, parts, step, owner = (np.array([getattr(cut, name) for cut in cuts]) for name in ("dim", "parts", "step", "owner"))
    tables = []
    for rank in range(size):
        rank_cuts = np.flatnonzero((owner == -1) | (owner == rank))
        offset, extent = everything.offset[rank_cuts], everything.size[rank_cuts]
        rows = np.flatnonzero(parts[rank_cuts] > 1)
        rank_part, along = rank_cuts[rows], dim[rank_cuts[rows]]
        length = extent[rows, along]
        # A part is on several ranks where there are too few parts.
        start = np.minimum(rank * parts[rank_part] // size * step[rank_part], length)
        offset[rows, along] += start
        extent[rows, along] = np.minimum(step[rank_part], length - start)
        tables.append(LayoutTable(everything.tensor[rank_cuts], offset, extent, everything.unit[rank_cuts], everything.units))
    return tables


def _cuts(of: SimpleNamespace, vllm: VLLMConfig, tensor: Tensor) -> list[_TensorCut]:
    unit = _unit(of, tensor)
    if isinstance(tensor.split, tuple):
        return _cuts_of_parts(of, vllm.tensor_parallel_size, tensor, unit, tensor.split)
    leaf = tensor.name.rpartition(".")[2]
    if tensor.part == "routed" and leaf in _STACKED:
        return [_stacked_cut(vllm, tensor, unit, _STACKED[leaf])]
    return [_vllm_cut(of, vllm, tensor, unit)]


def _cuts_of_parts(of: SimpleNamespace, size: int, tensor: Tensor, unit: str, rows: tuple[int, ...]) -> list[_TensorCut]:
    """Return a cut for each part of a state space's or a delta net's joint projection or convolution.

    rows: the number of rows of each part. If a state space has a single group, every rank has the whole B and C.
    """
    if of.model_type in QWEN3_5:
        shared, name, groups = np.arange(0), "linear_num_key_heads", of.linear_num_key_heads
    else:
        shared = len(rows) - 3 + np.arange(2) if len(rows) > 3 else np.arange(1, 3)
        name, groups = "n_groups", of.n_groups
    if groups % size and (groups > 1 or not shared.size):
        message = f"got {size} for a model with {name}={groups}; expected a divisor, since vLLM does not cut a group"
        raise RecipeError(Problem(_SIZE, "not-divisible", message))
    cuts, start = [], 0
    for i, count in enumerate(rows):
        box = Box((start, *[0] * (len(tensor.shape) - 1)), (count, *tensor.shape[1:]))
        parts = 1 if i in shared and groups == 1 else size
        cuts.append(_TensorCut(unit, tensor.name, 0, parts, _step(tensor.name, 0, count, parts), box=box))
        start += count
    return cuts


def _stacked_cut(vllm: VLLMConfig, tensor: Tensor, unit: str, dim: int) -> _TensorCut:
    """Return the cut of a tensor that stacks all experts of a layer along its first dimension.

    dim: the dimension that tensor parallelism cuts; -1: only the first rank has the tensor.
    """
    size, dim = vllm.tensor_parallel_size, 0 if vllm.expert_parallel_size > 1 else dim
    if dim == -1 or size == 1:
        return _TensorCut(unit, tensor.name, owner=0)
    # gate and up projection alternate, so a rank's part is whole pairs
    return _TensorCut(unit, tensor.name, dim, size, _step(tensor.name, dim, tensor.shape[dim], size))


def _vllm_cut(of: SimpleNamespace, vllm: VLLMConfig, tensor: Tensor, unit: str) -> _TensorCut:
    size = vllm.tensor_parallel_size
    if tensor.expert is not None and vllm.expert_parallel_size > 1:
        return _TensorCut(unit, tensor.name, owner=_rank_of_expert(tensor.expert, experts(of), size))
    whole_states = of.model_type == "nemotron_h" and tensor.name.endswith((".A_log", ".D", ".dt_bias"))
    if tensor.split == "none" or whole_states:
        return _TensorCut(unit, tensor.name)  # vLLM computes A from A_log, so its loader takes all of that module's tensors
    dim, parts = 1 if tensor.split == "columns" else 0, size
    length = tensor.shape[dim]
    if tensor.part in ("embedding", "output"):
        length = -(-length // _PADDING) * _PADDING
    elif tensor.name.rpartition(".")[0].endswith((".k_proj", ".v_proj")):
        parts = min(size, of.num_key_value_heads)
    return _TensorCut(unit, tensor.name, dim, parts, _step(tensor.name, dim, length, parts))


def _step(name: str, dim: int, length: int, parts: int) -> int:
    """Return length / parts: the entries of one part of a tensor's dimension `dim`. Raises RecipeError for a remainder."""
    if length % parts:
        message = f"{parts} does not divide dimension {dim} of {name}, which has {length} entries"
        raise RecipeError(Problem(_SIZE, "not-divisible", message))
    return length // parts


def _rank_of_expert(expert: int, count: int, size: int) -> int:
    """Return the rank of an expert, as vLLM's determine_expert_map does.

    Each rank has consecutive experts. If `size` does not divide `count`, the first ranks have one expert more.
    """
    per_rank, remainder = divmod(count, size)
    return (
        expert // (per_rank + 1)
        if expert < remainder * (per_rank + 1)
        else remainder + (expert - remainder * (per_rank + 1)) // per_rank
    )


def _unit(of: SimpleNamespace, tensor: Tensor) -> str:
    """Return the name of vLLM's module that holds the tensor."""
    module = tensor.name.rpartition(".")[0]
    if of.model_type in _RENAMED:
        for transformers_name, vllm_name in _RENAMED[of.model_type].items():
            module = module.replace(transformers_name, vllm_name)
    parent, _, leaf = module.rpartition(".")
    latent = of.model_type == "deepseek_v3"
    if tensor.expert is not None:
        return f"{parent.rpartition('.')[0]}.routed_experts"
    if of.model_type == "gpt_oss" and tensor.part == "routed":
        return f"{module}.routed_experts"
    if leaf in ("q_proj", "k_proj", "v_proj") and not latent:
        return f"{parent}.qkv_proj"
    if leaf == "gate_proj" or (leaf == "up_proj" and of.model_type != "nemotron_h"):
        return f"{parent}.gate_up_proj"
    if leaf in _JOINED:
        return f"{parent}.{_JOINED[leaf]}"
    if leaf in ("q_a_proj", "kv_a_proj_with_mqa") and of.q_lora_rank is not None:
        return f"{parent}.fused_qkv_a_proj"
    return module
