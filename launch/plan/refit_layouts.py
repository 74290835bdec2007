"""Compute the boxes that each rank holds or receives, from the recipe and the model's config.json only.

The plan of a run uses this module. It needs no processes and no weights, and does not import torch, transformers or vLLM. A run
itself gets the layouts from its backends (`layout`), and tests compare both.

Train ranks: FSDP2 with tensor parallelism, by torch's chunks of transformers' parameters, which join the experts of a layer
into one parameter; Megatron-Core, by the family's description in `pipeline/models`. Generate ranks: vLLM with tensor, expert
and pipeline parallelism; transformers, with the whole model on each rank.

Ranks with the same boxes share one table.

Not supported: families that `pipeline.models.tensors` does not describe, gpt_oss in vLLM (which pads its experts), quantized
weights, and multi-token prediction.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from launch.plan.layout_tables import Shape, TableBuilder, joined
from launch.plan.refit_adapters import adapter_tensors, received
from pipeline import models
from pipeline.boxes import Box, chunk, whole
from pipeline.config import (
    MegatronConfig,
    PolicyConfig,
    Problem,
    Recipe,
    RecipeError,
    VLLMConfig,
    engine_ranks,
    expert_tensor_parallel_size,
    ranks,
    uses_megatron,
)
from pipeline.models import decoder
from pipeline.models.base import Parameter
from pipeline.models.config_json import check_fsdp
from pipeline.models.sizes import sizes
from pipeline.models.tensors import Part, Tensor, experts, tensors
from pipeline.refit.tables import LayoutTable
from pipeline.train.adapters.spec import refits_adapters

_MODEL = "policy.model_name"
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE: the vocabulary is padded to a multiple of it, then cut
# The description divides these by rows, but every rank of our stages holds them whole, with and without TransformerEngine.
_WHOLE = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
_EVERYWHERE: dict[str, tuple[Part, ...]] = {  # tensors that vLLM's models have on every stage, besides the stage's layers
    "qwen3_moe": ("embedding", "norm", "output"),
    "mixtral": ("embedding", "norm", "output"),
    "gemma3_text": ("norm",),
}


@dataclass(frozen=True, slots=True)
class RankLayouts:
    """Boxes of all ranks. Train ranks come first, then the engines' ranks, as in a run."""

    train: dict[int, LayoutTable]  # by global rank
    generate: dict[int, LayoutTable]
    engines: list[list[int]]  # global ranks
    shapes: dict[str, Shape]  # of every tensor on disk, in a checkpoint's order


def recipe_layouts(config: Mapping[str, Any], recipe: Recipe) -> RankLayouts:
    """Return the boxes of a recipe's ranks. config: config.json of the policy's model. Raises RecipeError."""
    sizes = ranks(recipe.cluster.train), ranks(recipe.cluster.generate)
    return rank_layouts(config, recipe.policy, *sizes, adapters=refits_adapters(recipe))


def rank_layouts(
    config: Mapping[str, Any], policy: PolicyConfig, train: int, generate: int, adapters: bool = False
) -> RankLayouts:
    """Return the boxes of all ranks. Raises RecipeError.

    config: config.json, used instead of policy.model_name's. train, generate: numbers of ranks. The parallel sizes come from
    `policy.megatron_cfg` if that is enabled, else `policy.dtensor_cfg`, and from `policy.generation`. adapters: of the adapters
    alone, which every rank of an engine gets whole.
    """
    try:
        of, found = sizes(config), tensors(config)
    except KeyError as error:
        raise RecipeError(Problem(_MODEL, "bad-format", f"its config.json has no {error}")) from None
    except ValueError as error:
        raise RecipeError(Problem(_MODEL, "unsupported", str(error))) from None
    if adapters:
        if uses_megatron(policy):
            message = "got adapter with Megatron-Core, whose adapters are not planned"
            raise RecipeError(Problem("policy.generation.lora_refit", "unsupported", message))
        found = adapter_tensors(found, policy.dtensor_cfg.lora_cfg)
    builder = TableBuilder(found)
    if uses_megatron(policy):
        held = _megatron(of, policy.megatron_cfg, train, builder)
    else:
        check_fsdp(config, policy.dtensor_cfg)
        held = _fsdp(policy, train, builder)
    size = engine_ranks(policy.generation.vllm_cfg)
    if adapters:
        wanted = [builder.table(received(found))] * size
    elif policy.generation.backend == "vllm":
        wanted = _vllm(of, policy.generation.vllm_cfg, builder)
    else:
        wanted = [builder.table((name, name, whole(shape)) for name, shape in builder.shapes.items())]
    engines = [list(range(first, first + size)) for first in range(train, train + generate, size)]
    return RankLayouts(
        train=dict(enumerate(held)),
        generate={rank: wanted[place] for engine in engines for place, rank in enumerate(engine)},
        engines=engines,
        shapes=builder.shapes,
    )


# ---- FSDP2 and tensor parallelism ---------------------------------------------------------------------------------------


def _fsdp(policy: PolicyConfig, train: int, builder: TableBuilder) -> list[LayoutTable]:
    """Return the tables of the train ranks.

    Ranks are numbered as in `pipeline/train/fsdp_mesh.py`. torch cuts every parameter along its first dimension. Of a layer's
    stacked experts that is the one that counts them; expert-parallel ranks cut it before `fully_shard` does, and tensor
    parallelism does not cut it. Constants that keep another precision are whole on
    every rank.
    """
    dtensor, cut_constants = policy.dtensor_cfg, policy.precision == "float32"
    number, origin, extent = builder.columns((tensor.name, whole(tensor.shape)) for tensor in builder.tensors)
    expert = np.array([-1 if tensor.expert is None else tensor.expert for tensor in builder.tensors])
    routed = np.array([tensor.part == "routed" for tensor in builder.tensors])
    dense = ~routed & np.array([cut_constants or tensor.part != "buffer" for tensor in builder.tensors])
    cut = {dim: dense & _split_by_fsdp(builder.tensors, split) for dim, split in enumerate(("rows", "columns"))}
    of_replica = train // dtensor.data_parallel_replicate_size
    tensor_size, expert_size = dtensor.tensor_parallel_size, dtensor.expert_parallel_size
    of_rank = (expert.max() + 1) // expert_size  # experts
    each = -(-of_rank // (of_replica // expert_size))

    def table(rank: int) -> LayoutTable:
        offset, length = origin.copy(), extent.copy()
        data_rank, tensor_rank = divmod(rank, tensor_size)
        shard, expert_rank = divmod(rank, expert_size)
        for dim, mine in cut.items():
            _chunk(offset, length, mine, dim, tensor_size, tensor_rank)
        _chunk(offset, length, dense, 0, of_replica // tensor_size, data_rank)
        stacked = routed & (expert < 0)
        _chunk(offset, length, stacked, 0, expert_size, expert_rank)
        _chunk(offset, length, stacked, 0, of_replica // expert_size, shard)
        held = (expert < 0) | ((expert // max(of_rank, 1) == expert_rank) & (expert % max(of_rank, 1) // max(each, 1) == shard))
        held &= length[:, 0] > 0
        return joined([number[held], offset[held], length[held]])

    return [table(rank % of_replica) for rank in range(train)]


def _split_by_fsdp(found: list[Tensor], split: str) -> np.ndarray:
    """Return which tensors transformers' tensor-parallel plan cuts this way: all of the split but latent attention."""
    latent = any("kv_a_proj" in tensor.name for tensor in found)
    return np.array([tensor.split == split and not (latent and tensor.part == "attention") for tensor in found])


def _chunk(offset: np.ndarray, size: np.ndarray, rows: np.ndarray, dim: int, parts: int, part: int) -> None:
    """Divide the boxes in these rows in place, as `boxes.chunk` does."""
    step = -(-size[rows, dim] // parts)
    start = np.minimum(part * step, size[rows, dim])
    offset[rows, dim] += start
    size[rows, dim] = np.minimum(step, size[rows, dim] - start)


# ---- Megatron-Core ------------------------------------------------------------------------------------------------------


def _megatron(of: SimpleNamespace, megatron: MegatronConfig, train: int, builder: TableBuilder) -> list[LayoutTable]:
    """Return the tables of the train ranks.

    Ranks are numbered as by megatron.core.parallel_state: tensor, context, data, pipeline, the first the fastest; where experts
    are concerned expert tensor, expert, data, pipeline.
    """
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    expert, expert_tensor = megatron.expert_model_parallel_size, expert_tensor_parallel_size(megatron)
    stages = _stages(of, megatron)
    shared: list[dict[str, Parameter]] = [{} for _ in stages]
    routed: list[list[dict[str, Parameter]]] = [[{} for _ in range(expert)] for _ in stages]
    for name, parameter in _parameters(of, builder.shapes).items():
        for stage in _stages_of(_layer(name), name == _VOCABULARY[0], stages, of.tie_word_embeddings):
            if parameter.expert is None:
                shared[stage][name] = parameter
            else:
                routed[stage][parameter.expert * expert // experts(of)][name] = parameter

    @functools.cache
    def part(stage: int, spread: int | None, rank: int) -> list[np.ndarray]:
        chosen, size = (shared[stage], tensor) if spread is None else (routed[stage][spread], expert_tensor)
        return builder.columns(
            box for name, p in chosen.items() for box in _megatron_boxes(name, p, builder.shapes, rank, size)
        )

    @functools.cache
    def table(stage: int, rank: int, spread: int, expert_rank: int) -> LayoutTable:
        if not routed[stage][spread]:
            return dense(stage, rank)
        return joined(part(stage, None, rank), part(stage, spread, expert_rank))

    @functools.cache
    def dense(stage: int, rank: int) -> LayoutTable:
        return joined(part(stage, None, rank))

    peers = train // pipeline
    return [table(r // peers, r % tensor, r // expert_tensor % expert, r % expert_tensor) for r in range(train)]


def _parameters(of: SimpleNamespace, shapes: dict[str, Shape]) -> dict[str, Parameter]:
    """Return the family's parameters. Raises RecipeError if it leaves out a tensor that is on disk."""
    parameters = models.family(of.model_type).parameters(of)
    known = {source for parameter in parameters.values() for source in parameter.sources}
    if left := [name for name in shapes if name not in known]:
        message = f"this {of.model_type} has {left[0]}, which its family does not describe"
        raise RecipeError(Problem(_MODEL, "unsupported", message))
    return parameters


def _megatron_boxes(
    name: str, parameter: Parameter, shapes: dict[str, Shape], rank: int, size: int
) -> Iterator[tuple[str, Box]]:
    """Yield the boxes of one rank of `size`. Raises RecipeError if `size` does not divide the parameter."""
    sources = [(source, whole(shapes[source])) for source in parameter.sources]
    if name in _VOCABULARY:  # padded, then cut in equal parts
        yield sources[0][0], chunk(sources[0][1], 0, size, rank)
    elif isinstance(parameter.function, functools.partial) and parameter.function.func is decoder.query_groups:
        (groups,) = parameter.function.args
        if size % groups:  # else a rank has a part of one group
            _divided(name, groups, size)
        yield from _query_group_boxes(sources, groups, rank, _divided(name, sum(box.size[0] for _, box in sources), size))
    else:
        if isinstance(parameter.split, tuple) and size > 1:
            ((source, box),) = sources
            yield from ((source, part) for part in _part_boxes(name, box, parameter.split, rank, size))
            return
        cut = size > 1 and parameter.split != "none" and not name.endswith(_WHOLE)
        dim = 1 if parameter.split == "columns" else 0
        for source, box in sources:
            if cut:
                _divided(name, box.size[dim], size)
            yield source, chunk(box, dim, size, rank) if cut else box


def _part_boxes(name: str, box: Box, parts: tuple[int, ...], rank: int, size: int) -> Iterator[Box]:
    """Yield a rank's boxes of a parameter whose parts, with these numbers of rows, are cut each by rows."""
    start = 0
    for rows in parts:
        each = _divided(name, rows, size)
        yield Box((start + rank * each, *box.offset[1:]), (each, *box.size[1:]))
        start += rows


def _query_group_boxes(sources: list[tuple[str, Box]], groups: int, rank: int, rows: int) -> Iterator[tuple[str, Box]]:
    """Yield a rank's boxes of a joint projection, whose rows are each group's queries, key and value."""
    each = sum(box.size[0] for _, box in sources) // groups
    low, high = rank * rows, (rank + 1) * rows
    for group in range(low // each, -(-high // each)):
        at = group * each
        for source, box in sources:
            part = chunk(box, 0, groups, group)
            start, stop = max(low, at), min(high, at + part.size[0])
            if start < stop:
                yield source, Box((part.offset[0] + start - at, *part.offset[1:]), (stop - start, *part.size[1:]))
            at += part.size[0]


def _divided(name: str, count: int, size: int) -> int:
    if count % size:
        key = "policy.megatron_cfg.tensor_model_parallel_size"
        raise RecipeError(Problem(key, "not-divisible", f"{name} cannot be cut into {size} equal parts"))
    return count // size


def _stages(of: SimpleNamespace, megatron: MegatronConfig) -> list[range]:
    """Return the layers of each pipeline stage: those of the first and the last may be given, the others are equal.

    Raises RecipeError where Megatron-Core does.
    """
    count, layers = megatron.pipeline_model_parallel_size, of.num_hidden_layers
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    middle = count - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < 0 or (rest % middle if middle else rest):
        message = (
            f"{layers} layers cannot be divided among {count} stages with num_layers_in_first_pipeline_stage={first} and"
            f" num_layers_in_last_pipeline_stage={last}"
        )
        raise RecipeError(Problem("policy.megatron_cfg.pipeline_model_parallel_size", "not-divisible", message))
    each = rest // middle if middle else 0
    counts = [*([] if first is None else [first]), *[each] * middle, *([] if last is None else [last])]
    return _ranges(counts)


def _ranges(counts: list[int]) -> list[range]:
    stops = np.cumsum(counts).tolist()
    return [range(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


def _stages_of(layer: int | None, embedding: bool, stages: list[range], tied: bool) -> list[int]:
    """Return the stages that hold the tensors of a layer, of the embedding, or of neither.

    A tied embedding is the last stage's output layer as well.
    """
    last = len(stages) - 1
    if layer is not None:
        return [i for i, layers in enumerate(stages) if layer in layers]
    if embedding:
        return sorted({0, last}) if tied else [0]
    return [last]


def _layer(name: str) -> int | None:
    """Return the layer of a parameter of Megatron-Core's; None if it is in none."""
    return int(name.split(".")[2]) if name.startswith("decoder.layers.") else None


# ---- vLLM ---------------------------------------------------------------------------------------------------------------


class _TensorCut(NamedTuple):
    """The division of a tensor on disk over the ranks of a stage."""

    unit: str
    name: str
    dim: int = 0  # cut along this one
    parts: int = 1  # in so many
    step: int = 0  # of so many entries, the last ones shorter or empty
    owner: int = -1  # the one rank that has it; -1: all


def _vllm(of: SimpleNamespace, vllm: VLLMConfig, builder: TableBuilder) -> list[LayoutTable]:
    """Return the tables of an engine's ranks: rank = pipeline rank * tensor-parallel size + tensor-parallel rank."""
    if of.model_type in ("gpt_oss", "nemotron_h"):
        message = f"which parts of a '{of.model_type}' model vLLM's ranks have is not described"
        raise RecipeError(Problem(_MODEL, "unsupported", message))
    tensor, pipeline = vllm.tensor_parallel_size, vllm.pipeline_parallel_size
    layers, rest = divmod(of.num_hidden_layers, pipeline)
    # get_pp_indices of vllm/distributed/utils.py: what is left over goes to the stages before the last.
    stages = _ranges([layers + (pipeline - 1 - rest <= stage < pipeline - 1) for stage in range(pipeline)])
    cuts: list[list[_TensorCut]] = [[] for _ in stages]
    for one in builder.tensors:
        homes = _stages_of(one.layer, one.part == "embedding", stages, of.tie_word_embeddings)
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
