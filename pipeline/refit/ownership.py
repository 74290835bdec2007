"""Which boxes every rank of a run holds or wants, from the recipe and the model's config alone: no processes, weights or vLLM.

For planning runs that are not there. A run itself asks its backends (`layout`), and tests hold both against each other.

Train ranks: FSDP2 with tensor parallelism, by the pieces of which transformers' model consists and the cuts that torch makes
of its tensors; Megatron-Core, by the family's description in `pipeline/models`. Generate ranks: vLLM at tensor, expert and
pipeline parallelism, by the same description, for it says which tensors are fused and how each is cut; transformers, whose
engines are one rank that has everything.

Tables are shared: ranks that hold the same have one object.

Left out: vLLM's models of other families than Megatron-Core trains, quantised weights, and multi-token prediction.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline import models
from pipeline.boxes import Box, chunk, whole
from pipeline.config import (
    MegatronConfig,
    PolicyConfig,
    Recipe,
    VLLMConfig,
    engine_ranks,
    expert_tensor_parallel_size,
    ranks,
    uses_megatron,
)
from pipeline.models.base import Parameter
from pipeline.models.hugging_face import checkpoint_shapes, layout, meta_model, model_config
from pipeline.models.layout import Shape, cut_of, record, restrict
from pipeline.refit.tables import Table, columns
from pipeline.train.tensor_parallel import KEY as TENSOR_KEY
from pipeline.train.tensor_parallel import expand

_KEY = "policy.generation.vllm_cfg.tensor_parallel_size"
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_PADDING = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE: the vocabulary is padded to a multiple of it, then cut
# Described as cut by rows, but whole on every rank: in vLLM, and with TransformerEngine as well as without in our stages.
_WHOLE = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")

Held = Iterable[tuple[str, Box]]
"""(tensor on disk, box of it)"""


@dataclass(frozen=True, slots=True)
class Ownership:
    """Train ranks come first, then the engines' ranks, as in a run."""

    train: dict[int, Table]  # by global rank
    generate: dict[int, Table]
    engines: list[list[int]]  # global ranks
    shapes: dict[str, Shape]  # of every tensor on disk, in a checkpoint's order


def tables(recipe: Recipe) -> Ownership:
    """Raises ValueError, naming the recipe's key, if the model cannot be laid out so."""
    return ownership(model_config(recipe.policy), recipe.policy, ranks(recipe.cluster.train), ranks(recipe.cluster.generate))


def ownership(config: PreTrainedConfig, policy: PolicyConfig, train: int, generate: int) -> Ownership:
    """config: the model's, in the place of policy.model_name's; train, generate: the numbers of ranks. The model's layouts are
    taken from `policy.megatron_cfg` if that is enabled, else `policy.dtensor_cfg`, and `policy.generation`.

    Raises ValueError, naming the recipe's key.
    """
    shapes, _ = checkpoint_shapes(config)
    maker = _Maker(shapes)
    described = uses_megatron(policy) or policy.generation.backend == "vllm"
    parameters = _parameters(config, shapes) if described else {}
    megatron = policy.megatron_cfg
    held = (
        _megatron(config, parameters, megatron, train, maker) if uses_megatron(policy) else _fsdp(config, policy, train, maker)
    )
    size = engine_ranks(policy.generation.vllm_cfg)
    if policy.generation.backend == "vllm":
        wanted = _vllm(config, parameters, policy.generation.vllm_cfg, maker)
    else:
        wanted = [maker.table([(name, name, whole(shape)) for name, shape in shapes.items()])]
    engines = [list(range(first, first + size)) for first in range(train, train + generate, size)]
    return Ownership(
        train=dict(enumerate(held)),
        generate={rank: wanted[place] for engine in engines for place, rank in enumerate(engine)},
        engines=engines,
        shapes=shapes,
    )


def _parameters(config: PreTrainedConfig, shapes: dict[str, Shape]) -> dict[str, Parameter]:
    """The family's. Raises ValueError if it leaves out a tensor that is on disk."""
    parameters = models.family(config).parameters(config)
    known = {source for parameter in parameters.values() for source in parameter.sources}
    if left := [name for name in shapes if name not in known]:
        raise ValueError(f"policy.model_name: this {config.model_type} has {left[0]}, which its family does not describe")
    return parameters


class _Maker:
    """Tables of boxes by name."""

    def __init__(self, shapes: dict[str, Shape]) -> None:
        self.shapes = shapes
        self._number = {name: i for i, name in enumerate(shapes)}
        self._dims = max(map(len, shapes.values())) or 1

    def columns(self, held: Held) -> list[np.ndarray]:
        """Tensor, offset, size."""
        return columns(list(held), self._number, self._dims)

    def table(self, wanted: Iterable[tuple[str, str, Box]]) -> Table:
        """Of a generate rank: (unit, tensor, box)."""
        wanted = list(wanted)
        units = {unit: i for i, unit in enumerate(dict.fromkeys(unit for unit, _, _ in wanted))}
        unit = np.array([units[unit] for unit, _, _ in wanted], np.int32)
        return Table(*self.columns((name, box) for _, name, box in wanted), unit, list(units))


def _joined(*parts: list[np.ndarray]) -> Table:
    """Of a train rank."""
    tensor, offset, size = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return Table(tensor, offset, size, np.full(len(tensor), -1, np.int32))


# ---- FSDP2 and tensor parallelism ---------------------------------------------------------------------------------------


def _fsdp(config: PreTrainedConfig, policy: PolicyConfig, train: int, maker: _Maker) -> list[Table]:
    """Rank = data rank * tensor-parallel size + tensor-parallel rank, as in `pipeline/train/fsdp.py`."""
    tensor = policy.dtensor_cfg.tensor_parallel_size
    data = train // tensor
    model = meta_model(config)
    pieces = layout(model)
    cuts = _cuts(model) if tensor > 1 else {}
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    # Pieces of a tensor of many (experts) are looked up by where they begin along its first dimension.
    begins = {name: np.array([p.target.offset[0] if p.target.offset else 0 for p in found]) for name, found in pieces.items()}
    ends = {name: begins[name] + [p.target.size[0] if p.target.size else 1 for p in found] for name, found in pieces.items()}

    def held(data_rank: int, tensor_rank: int) -> Iterator[tuple[str, Box]]:
        for name, shape in parameters.items():
            box = whole(shape)
            if name in cuts:
                box = chunk(box, cuts[name], tensor, tensor_rank)
            box = chunk(box, 0, data, data_rank)
            if not box.numel:
                continue
            near = (begins[name] < box.offset[0] + box.size[0]) & (ends[name] > box.offset[0])
            for piece in restrict([pieces[name][i] for i in np.flatnonzero(near)], box):
                yield piece.name, piece.source

    return [_joined(maker.columns(held(*divmod(rank, tensor)))) for rank in range(train)]


_DIMENSION = {
    "colwise": 0,
    "colwise_gather_output": 0,
    "embedding_rowwise": 0,
    "rowwise": 1,
    "replicated_with_grad_allreduce": None,
}


def _cuts(model: PreTrainedModel) -> dict[str, int]:
    """Parameter -> the dimension that tensor parallelism cuts, as in `pipeline/train/tensor_parallel.py`; others are whole."""
    found = {}
    for name, style in expand(model).items():
        if style not in _DIMENSION:
            raise ValueError(f"{TENSOR_KEY}: style '{style}' of {name} is not supported; it must be 1 for this model")
        for parameter, tensor in model.get_submodule(name).named_parameters(recurse=False):
            dim = _DIMENSION[style]
            if dim is not None and dim < tensor.dim():  # the bias of a module that is cut by columns is whole
                found[f"{name}.{parameter}"] = dim
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        found[names[id(module.weight)]] = 0
    return found


# ---- Megatron-Core ------------------------------------------------------------------------------------------------------


def _megatron(
    config: PreTrainedConfig, parameters: dict[str, Parameter], megatron: MegatronConfig, train: int, maker: _Maker
) -> list[Table]:
    """Ranks are numbered as by megatron.core.parallel_state: tensor, context, data, pipeline, the first the fastest; where
    experts are concerned expert tensor, expert, data, pipeline."""
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    expert, expert_tensor = megatron.expert_model_parallel_size, expert_tensor_parallel_size(megatron)
    stages = _stages(config, megatron)
    last = max((p.expert for p in parameters.values() if p.expert is not None), default=-1)
    shared: list[dict[str, Parameter]] = [{} for _ in stages]
    experts: list[list[dict[str, Parameter]]] = [[{} for _ in range(expert)] for _ in stages]
    for name, parameter in parameters.items():
        for stage in _stages_of(name, stages, config.tie_word_embeddings):
            if parameter.expert is None:
                shared[stage][name] = parameter
            else:
                experts[stage][parameter.expert * expert // (last + 1)][name] = parameter

    @functools.cache
    def part(stage: int, spread: int | None, rank: int) -> list[np.ndarray]:
        chosen, size = (shared[stage], tensor) if spread is None else (experts[stage][spread], expert_tensor)
        return maker.columns(box for name, p in chosen.items() for box in _megatron_boxes(name, p, maker.shapes, rank, size))

    @functools.cache
    def table(stage: int, rank: int, spread: int, expert_rank: int) -> Table:
        if not experts[stage][spread]:
            return dense(stage, rank)
        return _joined(part(stage, None, rank), part(stage, spread, expert_rank))

    @functools.cache
    def dense(stage: int, rank: int) -> Table:
        return _joined(part(stage, None, rank))

    peers = train // pipeline
    return [table(r // peers, r % tensor, r // expert_tensor % expert, r % expert_tensor) for r in range(train)]


def _megatron_boxes(
    name: str, parameter: Parameter, shapes: dict[str, Shape], rank: int, size: int
) -> Iterator[tuple[str, Box]]:
    sources = [(source, shapes[source]) for source in parameter.sources]
    if name in _VOCABULARY:  # padded, then cut in equal parts
        yield sources[0][0], chunk(whole(sources[0][1]), 0, size, rank)
        return
    split = "none" if name.endswith(_WHOLE) else parameter.split
    _, pieces = record(cut_of(parameter.function, split, rank, size), sources)
    for piece in pieces:
        yield piece.name, piece.source


def _stages(config: PreTrainedConfig, megatron: MegatronConfig) -> list[range]:
    """The layers of each pipeline stage: those of the first and the last may be given, the others are equal.

    Raises ValueError where Megatron-Core does.
    """
    count, layers = megatron.pipeline_model_parallel_size, config.num_hidden_layers
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    middle = count - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < 0 or (rest % middle if middle else rest):
        raise ValueError(
            f"policy.megatron_cfg.pipeline_model_parallel_size: {layers} layers cannot be divided among {count} stages with"
            f" num_layers_in_first_pipeline_stage={first} and num_layers_in_last_pipeline_stage={last}"
        )
    each = rest // middle if middle else 0
    counts = [first] * (first is not None) + [each] * middle + [last] * (last is not None)
    return _ranges(counts)


def _ranges(counts: list[int]) -> list[range]:
    stops = np.cumsum(counts).tolist()
    return [range(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


def _stages_of(name: str, stages: list[range], tied: bool) -> list[int]:
    """The stages that hold a parameter. A tied embedding is the last one's output layer as well."""
    if name.startswith("decoder.layers."):
        layer = int(name.split(".")[2])
        return [i for i, layers in enumerate(stages) if layer in layers]
    last = len(stages) - 1
    if name == "embedding.word_embeddings.weight":
        return sorted({0, last}) if tied else [0]
    return [last]


# ---- vLLM ---------------------------------------------------------------------------------------------------------------


class _Cut(NamedTuple):
    """How the ranks of a stage share a tensor on disk."""

    unit: str
    name: str
    dim: int = 0  # cut along this one
    parts: int = 1  # in so many
    step: int = 0  # of so many entries, the last ones shorter or empty
    owner: int = -1  # the one rank that has it; -1: all


def _vllm(config: PreTrainedConfig, parameters: dict[str, Parameter], vllm: VLLMConfig, maker: _Maker) -> list[Table]:
    """Of each rank of an engine: rank = pipeline rank * tensor-parallel size + tensor-parallel rank."""
    tensor, pipeline = vllm.tensor_parallel_size, vllm.pipeline_parallel_size
    layers, rest = divmod(config.num_hidden_layers, pipeline)
    # get_pp_indices of vllm/distributed/utils.py: what is left over goes to the stages before the last.
    stages = _ranges([layers + (pipeline - 1 - rest <= stage < pipeline - 1) for stage in range(pipeline)])
    everywhere = models.family(config) is models.mixture  # vLLM's have embedding, norm and head on every stage
    found = []
    for stage in range(pipeline):
        cuts = [
            cut
            for name, parameter in parameters.items()
            if stage in _stages_of(name, stages, config.tie_word_embeddings)
            or (everywhere and not name.startswith("decoder.layers."))
            for cut in _vllm_cuts(config, vllm, name, parameter, maker.shapes)
        ]
        found += _vllm_tables(cuts, tensor, maker)
    return found


def _vllm_tables(cuts: list[_Cut], size: int, maker: _Maker) -> list[Table]:
    """Of the ranks of one stage."""
    everything = maker.table((cut.unit, cut.name, whole(maker.shapes[cut.name])) for cut in cuts)
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
        found.append(Table(everything.tensor[mine], offset, extent, everything.unit[mine], everything.units))
    return found


def _vllm_cuts(
    config: PreTrainedConfig, vllm: VLLMConfig, name: str, parameter: Parameter, shapes: dict[str, Shape]
) -> Iterator[_Cut]:
    size, unit = vllm.tensor_parallel_size, _unit(config, name, parameter)
    spread = parameter.expert is not None and vllm.expert_parallel_size > 1
    owner = _place_of(parameter.expert, _experts(config), size) if spread else -1
    for source in parameter.sources:
        if spread or parameter.split == "none" or name.endswith(_WHOLE):
            yield _Cut(unit, source, owner=owner)
            continue
        dim, parts = 1 if parameter.split == "columns" else 0, size
        length = shapes[source][dim]
        if name in _VOCABULARY:
            length = -(-length // _PADDING) * _PADDING
        elif source.rpartition(".")[0].endswith((".k_proj", ".v_proj")):
            parts = min(size, config.num_key_value_heads)
        if length % parts:
            raise ValueError(f"{_KEY}: {parts} does not divide dimension {dim} of {source}, which has {length} entries")
        yield _Cut(unit, source, dim, parts, length // parts)


def _experts(config: PreTrainedConfig) -> int:
    return getattr(config, "n_routed_experts", None) or config.num_local_experts


def _place_of(expert: int, count: int, size: int) -> int:
    """determine_expert_map of vLLM, linear: consecutive experts, one more on the first ranks if it does not divide."""
    each, rest = divmod(count, size)
    return expert // (each + 1) if expert < rest * (each + 1) else rest + (expert - rest * (each + 1)) // each


def _unit(config: PreTrainedConfig, name: str, parameter: Parameter) -> str:
    """vLLM's module that has the parameter."""
    module = parameter.sources[0].rpartition(".")[0]
    parent, _, own = module.rpartition(".")
    if parameter.expert is not None:
        return f"{parent.rpartition('.')[0]}.routed_experts"
    if ".linear_qkv." in name:
        return f"{parent}.qkv_proj"
    if name.endswith(".linear_fc1.weight"):
        return f"{parent}.gate_up_proj"
    if own in ("q_a_proj", "kv_a_proj_with_mqa") and config.q_lora_rank is not None:
        return f"{parent}.fused_qkv_a_proj"
    return module
