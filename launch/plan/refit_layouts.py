"""Compute the boxes that each rank holds or receives, from the recipe and the model's config.json only.

The plan of a run uses this module. It needs no processes and no weights, and does not import torch, transformers or vLLM. A run
itself gets the layouts from its backends (`layout`), and tests compare both.

For train ranks of FSDP2, boxes follow from tensor parallelism and from torch's chunks of transformers' parameters, which join
the experts of a layer into one parameter. For train ranks of Megatron-Core, they follow from the family's description in
`pipeline/models`. For generate ranks of vLLM, they follow from tensor, expert and pipeline parallelism. Each generate rank of
transformers has the whole model.

Ranks with the same boxes share one table.

Not supported: families that `pipeline.models.tensors` does not describe, quantized weights, and multi-token prediction.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from pipeline.models.config_json import check_fsdp
from pipeline.models.sizes import sizes

from launch.plan.engine_layouts import vllm_tables
from launch.plan.fsdp_splits import fsdp_splits
from launch.plan.layout_tables import Shape, TableBuilder, consecutive, join_tables, stages_of
from launch.plan.module_adapters import ModuleAdapters
from launch.plan.refit_adapters import adapter_tensors, received_boxes
from pipeline import models
from pipeline.boxes import Box, chunk, whole
from pipeline.config import (
    MegatronConfig,
    PolicyConfig,
    Problem,
    Recipe,
    RecipeError,
    engine_ranks,
    expert_tensor_parallel_size,
    ranks,
    uses_megatron,
)
from pipeline.models import decoder, gpt_oss, qwen3_5
from pipeline.models.family import Parameter
from pipeline.models.tensors import experts, tensors
from pipeline.refit.tables import LayoutTable
from pipeline.train.adapters.spec import refits_adapters

_MODEL = "policy.model_name"
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
# The description divides these by rows, but every rank of our stages holds them whole, with and without TransformerEngine.
_WHOLE = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")


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

    config: the model's config.json, used instead of the one of policy.model_name. train, generate: numbers of ranks. Parallel
    sizes of train ranks come from `policy.megatron_cfg` if that is enabled, else from `policy.dtensor_cfg`; those of engines
    come from `policy.generation`. adapters: whether to return only boxes of adapters, which every engine's ranks receive whole.
    """
    try:
        of, served = sizes(config), tensors(config)
    except KeyError as error:
        raise RecipeError(Problem(_MODEL, "bad-format", f"its config.json has no {error}")) from None
    except ValueError as error:
        raise RecipeError(Problem(_MODEL, "unsupported", str(error))) from None
    if uses_megatron(policy):
        weights = {tensor.name: tensor.shape for tensor in served}
        parameters, modules = _parameters(of, weights), None
        if adapters:
            modules = ModuleAdapters(policy.megatron_cfg.peft, parameters, served)
            parameters = {name: parameter for name, parameter in parameters.items() if modules.adapts(name)}
            served = modules.tensors()
        builder = TableBuilder(served)
        train_tables = _megatron(of, policy.megatron_cfg, train, builder, _MegatronParts(parameters, weights, modules))
    else:
        if adapters:
            served = adapter_tensors(served, policy.dtensor_cfg.lora_cfg)
        builder = TableBuilder(served)
        check_fsdp(config, policy.dtensor_cfg)
        train_tables = _fsdp(policy, train, builder)
    size = engine_ranks(policy.generation.vllm_cfg)
    if adapters:
        engine_tables = [builder.table(received_boxes(served))] * size
    elif policy.generation.backend == "vllm":
        engine_tables = vllm_tables(of, policy.generation.vllm_cfg, builder)
    else:
        engine_tables = [builder.table((name, name, whole(shape)) for name, shape in builder.shapes.items())]
    engines = [list(range(first, first + size)) for first in range(train, train + generate, size)]
    return RankLayouts(
        train=dict(enumerate(train_tables)),
        generate={rank: engine_tables[member] for engine in engines for member, rank in enumerate(engine)},
        engines=engines,
        shapes=builder.shapes,
    )


# ---- FSDP2 and tensor parallelism ---------------------------------------------------------------------------------------


def _fsdp(policy: PolicyConfig, train: int, builder: TableBuilder) -> list[LayoutTable]:
    """Return the tables of the train ranks.

    Ranks are numbered as in `pipeline/train/fsdp_mesh.py`. `fully_shard` cuts every parameter along its first dimension. For a
    layer's stacked experts, this dimension counts the experts: expert-parallel ranks cut it first, then `fully_shard` does, and
    tensor parallelism does not. Constants that keep another precision than the parameters are whole on every rank.
    """
    dtensor, cut_constants = policy.dtensor_cfg, policy.precision == "float32"
    number, origin, extent = builder.columns((tensor.name, whole(tensor.shape)) for tensor in builder.tensors)
    expert = np.array([-1 if tensor.expert is None else tensor.expert for tensor in builder.tensors])
    routed = np.array([tensor.part == "routed" for tensor in builder.tensors])
    dense = ~routed & np.array([cut_constants or tensor.part != "buffer" for tensor in builder.tensors])
    splits = np.array(fsdp_splits(builder.tensors, dtensor.sequence_parallel))
    cut = {dim: dense & (splits == split) for dim, split in enumerate(("rows", "columns"))}
    of_replica = train // dtensor.data_parallel_replicate_size
    tensor_size, expert_size = dtensor.tensor_parallel_size, dtensor.expert_parallel_size
    of_rank = (expert.max() + 1) // expert_size  # experts
    per_shard = -(-of_rank // (of_replica // expert_size))

    def table(rank: int) -> LayoutTable:
        offset, length = origin.copy(), extent.copy()
        data_rank, tensor_rank = divmod(rank, tensor_size)
        shard, expert_rank = divmod(rank, expert_size)
        for dim, rows_to_cut in cut.items():
            _chunk(offset, length, rows_to_cut, dim, tensor_size, tensor_rank)
        _chunk(offset, length, dense, 0, of_replica // tensor_size, data_rank)
        stacked = routed & (expert < 0)
        _chunk(offset, length, stacked, 0, expert_size, expert_rank)
        _chunk(offset, length, stacked, 0, of_replica // expert_size, shard)
        is_held = (expert < 0) | (
            (expert // max(of_rank, 1) == expert_rank) & (expert % max(of_rank, 1) // max(per_shard, 1) == shard)
        )
        is_held &= length[:, 0] > 0
        return join_tables([number[is_held], offset[is_held], length[is_held]])

    return [table(rank % of_replica) for rank in range(train)]


def _chunk(offset: np.ndarray, size: np.ndarray, rows: np.ndarray, dim: int, parts: int, part: int) -> None:
    """Replace the boxes in `rows` by part `part` of `parts` along dimension `dim`, in place, as `boxes.chunk` computes it."""
    step = -(-size[rows, dim] // parts)
    start = np.minimum(part * step, size[rows, dim])
    offset[rows, dim] += start
    size[rows, dim] = np.minimum(step, size[rows, dim] - start)


# ---- Megatron-Core ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _MegatronParts:
    """The tensors that Megatron-Core's ranks hold and a refit transfers: parameters, or only their adapters."""

    parameters: Mapping[str, Parameter]  # with adapters, only those that have one
    shapes: dict[str, Shape]  # of the model's tensors on disk
    adapters: ModuleAdapters | None  # held in place of the weights

    def boxes(self, name: str, rank: int, size: int) -> Iterator[tuple[str, Box]]:
        """Yield (tensor on disk, box) for the part of a parameter, or of its adapters, on one of `size` ranks.

        Raises RecipeError if `size` does not divide the parameter.
        """
        parts = _megatron_boxes(name, self.parameters[name], self.shapes, rank, size)
        return self.adapters.boxes(name, parts) if self.adapters else parts


def _megatron(
    of: SimpleNamespace, megatron: MegatronConfig, train: int, builder: TableBuilder, parts: _MegatronParts
) -> list[LayoutTable]:
    """Return the tables of the train ranks.

    Ranks are numbered as by megatron.core.parallel_state, in the order tensor, context, data, pipeline, where the tensor rank
    varies fastest. For experts, the order is expert tensor, expert, data, pipeline.
    """
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    expert, expert_tensor = megatron.expert_model_parallel_size, expert_tensor_parallel_size(megatron)
    stages = _stages(of, megatron)
    shared: list[list[str]] = [[] for _ in stages]
    routed: list[list[list[str]]] = [[[] for _ in range(expert)] for _ in stages]
    for name, parameter in parts.parameters.items():
        for stage in stages_of(_layer(name), name == _VOCABULARY[0], stages, of.tie_word_embeddings):
            if parameter.expert is None:
                shared[stage].append(name)
            else:
                routed[stage][parameter.expert * expert // experts(of)].append(name)

    @functools.cache
    def part(stage: int, spread: int | None, rank: int) -> list[np.ndarray]:
        chosen, size = (shared[stage], tensor) if spread is None else (routed[stage][spread], expert_tensor)
        return builder.columns(box for name in chosen for box in parts.boxes(name, rank, size))

    @functools.cache
    def table(stage: int, rank: int, spread: int, expert_rank: int) -> LayoutTable:
        if not routed[stage][spread]:
            return dense(stage, rank)
        return join_tables(part(stage, None, rank), part(stage, spread, expert_rank))

    @functools.cache
    def dense(stage: int, rank: int) -> LayoutTable:
        return join_tables(part(stage, None, rank))

    peers = train // pipeline
    return [table(r // peers, r % tensor, r // expert_tensor % expert, r % expert_tensor) for r in range(train)]


def _parameters(of: SimpleNamespace, shapes: dict[str, Shape]) -> dict[str, Parameter]:
    """Return name -> parameter of the model in Megatron-Core. Raises RecipeError if no parameter uses a tensor on disk."""
    parameters = models.family(of.model_type).parameters(of)
    sources = {source for parameter in parameters.values() for source in parameter.sources}
    if undescribed := [name for name in shapes if name not in sources]:
        message = f"the {of.model_type} model has the tensor {undescribed[0]}, which the description of its family lacks"
        raise RecipeError(Problem(_MODEL, "unsupported", message))
    return parameters


def _megatron_boxes(
    name: str, parameter: Parameter, shapes: dict[str, Shape], rank: int, size: int
) -> Iterator[tuple[str, Box]]:
    """Yield (tensor on disk, box) for the part of a parameter on one of `size` ranks.

    Raises RecipeError if `size` does not divide the parameter.
    """
    sources = [(source, whole(shapes[source])) for source in parameter.sources]
    function = parameter.function
    if isinstance(function, functools.partial) and function.func is gpt_oss.one_expert:  # one row of each tensor
        sources = [(source, chunk(box, 0, box.size[0], *function.args)) for source, box in sources]
    if name in _VOCABULARY:  # padded, then cut in equal parts
        yield sources[0][0], chunk(sources[0][1], 0, size, rank)
    elif isinstance(function, functools.partial) and function.func is decoder.query_groups:
        (groups,) = function.args
        if size % groups:  # else a rank has a part of one group
            _divide(name, groups, size)
        yield from _query_group_boxes(sources, groups, rank, _divide(name, sum(box.size[0] for _, box in sources), size))
    elif isinstance(function, functools.partial) and function.func is qwen3_5.gated_groups:
        groups, head = function.args
        if size % groups:
            _divide(name, groups, size)
        rows = _divide(name, sum(box.size[0] for _, box in sources), size)
        yield from _query_group_boxes(sources, groups, rank, rows, head)
    else:
        parts = parameter.split
        if parts == "halves" and len(sources) == 1:  # both halves are one tensor on disk
            parts = (_divide(name, sources[0][1].size[0], 2),) * 2
        if isinstance(parts, tuple) and size > 1:
            for source, box, rows_of_parts in _parts_of(sources, parts):
                yield from ((source, part) for part in _part_boxes(name, box, rows_of_parts, rank, size))
            return
        cut = size > 1 and parameter.split != "none" and not name.endswith(_WHOLE)
        dim = 1 if parameter.split == "columns" else 0
        for source, box in sources:
            if cut:
                _divide(name, box.size[dim], size)
            yield source, chunk(box, dim, size, rank) if cut else box


def _parts_of(sources: list[tuple[str, Box]], parts: tuple[int, ...]) -> Iterator[tuple[str, Box, tuple[int, ...]]]:
    """Yield (source, its box, numbers of rows of its parts) for each source of a parameter that stacks its sources.

    parts: the number of rows of each part of the parameter, in order. A source has one or several whole parts.
    """
    first = 0
    for source, box in sources:
        ends = list(itertools.accumulate(parts[first:]))
        last = first + ends.index(box.size[0]) + 1
        yield source, box, parts[first:last]
        first = last


def _part_boxes(name: str, box: Box, parts: tuple[int, ...], rank: int, size: int) -> Iterator[Box]:
    """Yield a rank's box of each part of a tensor on disk, whose parts are cut by rows one by one.

    parts: the number of rows of each part.
    """
    start = 0
    for rows in parts:
        rows_per_rank = _divide(name, rows, size)
        yield Box((start + rank * rows_per_rank, *box.offset[1:]), (rows_per_rank, *box.size[1:]))
        start += rows


def _query_group_boxes(
    sources: list[tuple[str, Box]], groups: int, rank: int, rows: int, gated: int = 0
) -> Iterator[tuple[str, Box]]:
    """Yield (tensor on disk, box) for a rank's rows of a joint projection, which stacks each group's queries, key and value.

    rows: the number of rows on each rank. gated: the number of rows of a head if queries have gates, else 0. A gate follows its
    query on disk; in the joint projection the gates of a group follow all of its queries.
    """
    rows_per_group = sum(box.size[0] for _, box in sources) // groups
    low, high = rank * rows, (rank + 1) * rows
    for group in range(low // rows_per_group, -(-high // rows_per_group)):
        at = group * rows_per_group
        (query, box), *key_and_value = ((source, chunk(box, 0, groups, group)) for source, box in sources)
        queries = _queries_then_gates(box, gated) if gated else [box]
        for source, part in [*((query, query_box) for query_box in queries), *key_and_value]:
            start, stop = max(low, at), min(high, at + part.size[0])
            if start < stop:
                yield source, Box((part.offset[0] + start - at, *part.offset[1:]), (stop - start, *part.size[1:]))
            at += part.size[0]


def _queries_then_gates(box: Box, head: int) -> list[Box]:
    """Return the boxes of all queries of a group, then those of all its gates.

    box: the group's box on disk, in which each query is followed by its gate. head: the number of rows of a query or gate.
    """
    first_row, other_offsets = box.offset[0], box.offset[1:]
    starts = [first_row + at for kind in (0, head) for at in range(kind, box.size[0], 2 * head)]
    return [Box((start, *other_offsets), (head, *box.size[1:])) for start in starts]


def _divide(name: str, count: int, size: int) -> int:
    if count % size:
        key = "policy.megatron_cfg.tensor_model_parallel_size"
        raise RecipeError(Problem(key, "not-divisible", f"{name} cannot be cut into {size} equal parts"))
    return count // size


def _stages(of: SimpleNamespace, megatron: MegatronConfig) -> list[range]:
    """Return the layers of each pipeline stage. The recipe may set the sizes of the first and the last; the others are equal.

    Raises RecipeError if Megatron-Core would refuse the division.
    """
    count, layers = megatron.pipeline_model_parallel_size, of.num_hidden_layers
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    middle = count - (first is not None) - (last is not None)
    middle_layers = layers - (first or 0) - (last or 0)
    if middle_layers < 0 or (middle_layers % middle if middle else middle_layers):
        message = (
            f"{layers} layers cannot be divided among {count} stages with num_layers_in_first_pipeline_stage={first} and"
            f" num_layers_in_last_pipeline_stage={last}"
        )
        raise RecipeError(Problem("policy.megatron_cfg.pipeline_model_parallel_size", "not-divisible", message))
    per_stage = middle_layers // middle if middle else 0
    counts = [*([] if first is None else [first]), *[per_stage] * middle, *([] if last is None else [last])]
    return consecutive(counts)


def _layer(name: str) -> int | None:
    """Return the layer number in the name of a Megatron-Core parameter; None for a parameter outside of layers."""
    return int(name.split(".")[2]) if name.startswith("decoder.layers.") else None


# ---- vLLM ---------------------------------------------------------------------------------------------------------------
