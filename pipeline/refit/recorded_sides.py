"""Record what every rank of a recipe holds or receives, in one process, without weights, GPUs or other ranks.

The parts of a run describe themselves: transformers, torch's FSDP2 and DTensor, Megatron-Core and vLLM build their models
without memory, on a rank of torch's fake process group, which has any size and whose collectives do nothing. Ranks that hold
the same boxes share a table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from pipeline.boxes import Piece, Region, whole
from pipeline.config import PolicyConfig, Recipe, engine_ranks, ranks, uses_megatron
from pipeline.models.hugging_face import checkpoint_shapes, model_config
from pipeline.models.recorded_layout import Shape, restrict
from pipeline.models.text_model import TextModel
from pipeline.refit.tables import LayoutTable, layout_table
from pipeline.train.train_backend import ModelRole

Shapes = Mapping[str, Shape]
Progress = Callable[[str], None]
"""Reports what is being recorded."""


@dataclass(frozen=True, slots=True)
class RecordedSides:
    """The layouts of all ranks. Train ranks come first, then the engines' ranks, as in a run."""

    train: dict[int, LayoutTable]  # by global rank
    generate: dict[int, LayoutTable]
    engines: list[list[int]]  # global ranks
    shapes: dict[str, Shape]  # of every tensor that a refit transfers, in a checkpoint's order


def record_sides(recipe: Recipe, progress: Progress = lambda text: None) -> RecordedSides:
    """Return the layouts of a recipe's ranks. Its train backend must be chosen, and the folder policy.model_name exist.

    The recipe's refits send whole weights. Takes the process's default group. Raises ImportError where the generate backend is
    not installed, RecipeError for a model or a layout that a backend does not support.
    """
    train, generate = ranks(recipe.cluster.train), ranks(recipe.cluster.generate)
    policy, size = _describable(recipe.policy), engine_ranks(recipe.policy.generation.vllm_cfg)
    shapes, _ = checkpoint_shapes(model_config(policy))
    train_tables = (_megatron if uses_megatron(policy) else _fsdp)(policy, train, shapes, progress)
    engine = _vllm(policy, shapes, progress) if policy.generation.backend == "vllm" else [_whole(shapes)] * size
    engines = [list(range(first, first + size)) for first in range(train, train + generate, size)]
    received = {rank: engine[member] for ranks_ in engines for member, rank in enumerate(ranks_)}
    return RecordedSides(dict(enumerate(train_tables)), received, engines, shapes)


def _describable(policy: PolicyConfig) -> PolicyConfig:
    """Return the policy without what needs a GPU or weights and changes no layout. Merged weights are held like others."""
    dtensor, megatron, generation = policy.dtensor_cfg, policy.megatron_cfg, policy.generation
    # vLLM's build for CPUs has no prefix caching for models with states.
    engine = replace(generation.vllm_cfg, precision="auto", enable_prefix_caching=False)
    return replace(
        policy,
        random_init=True,
        dtensor_cfg=replace(
            dtensor,
            compile=False,
            use_liger_kernel=False,
            flash_attention=None,
            lora_cfg=replace(dtensor.lora_cfg, enabled=False),
        ),
        megatron_cfg=replace(
            megatron,
            activation_checkpointing=False,
            apply_rope_fusion=None,
            moe_permute_fusion=None,
            moe_grouped_gemm=None,
            model_overrides={**megatron.model_overrides, "perform_initialization": False},
            peft=replace(megatron.peft, enabled=False),
        ),
        generation=replace(generation, vllm_kwargs={}, vllm_cfg=engine),
    )


@contextlib.contextmanager
def _rank_of(rank: int, count: int) -> Iterator[None]:
    """Make this process rank `rank` of `count` ranks of a fake default group, within the context."""
    dist.init_process_group("fake", rank=rank, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # equal meshes are one to DTensor, which would go on with those of another rank


def _table(pieces: Sequence[Piece], shapes: Shapes) -> LayoutTable:
    return layout_table([Region(piece.name, piece.source, "", 0, ()) for piece in pieces], shapes)


def _whole(shapes: Shapes) -> LayoutTable:
    """Return the table of a rank that receives every tensor whole."""
    return layout_table([Region(name, whole(shape), "", 0, ()) for name, shape in shapes.items()], shapes, list(shapes))


def _fsdp(policy: PolicyConfig, count: int, shapes: Shapes, progress: Progress) -> list[LayoutTable]:
    """Return the tables of FSDP2's ranks. The first rank's model has the placements of all; only coordinates differ."""
    from pipeline.train.fsdp_mesh import Layout, Meshes  # slow; only where FSDP2 trains
    from pipeline.train.fsdp_model import build
    from pipeline.train.shards import local_box

    progress("FSDP2")
    tables: dict[tuple[int, ...], LayoutTable] = {}
    with _rank_of(0, count):
        meshes = Meshes.of(Layout.of(policy.dtensor_cfg, count, 0), "cpu")
        model = build(policy, torch.device("meta"), meshes if count > 1 else None, 0, ModelRole())
        held = [(model.layout[name], parameter) for name, parameter in model.hf.named_parameters()]

        def table(rank: int) -> LayoutTable:
            place: dict[str, int] = {}
            for mesh in (meshes.dense, meshes.experts):
                place |= zip(mesh.mesh_dim_names or (), (mesh.mesh == rank).nonzero()[0].tolist(), strict=True)
            key = tuple(coordinate for name, coordinate in place.items() if name != "replicate")
            if key not in tables:
                parts = [piece for whole_, parameter in held for piece in restrict(whole_, local_box(parameter, place))]
                tables[key] = _table(parts, shapes)
            return tables[key]

        return [table(rank) for rank in range(count)]


def _megatron(policy: PolicyConfig, count: int, shapes: Shapes, progress: Progress) -> list[LayoutTable]:
    """Return the tables of Megatron-Core's ranks. Ranks that differ by their data or context number alone are recorded once."""
    from pipeline.train.megatron.groups import initialize, parallel_state  # slow; only where Megatron-Core trains

    tables: dict[tuple[int | None, ...], LayoutTable] = {}
    of_ranks = []
    for rank in range(count):
        with _rank_of(rank, count):
            initialize(policy, seed=0)
            try:
                place = (
                    parallel_state.get_pipeline_model_parallel_rank(),
                    parallel_state.get_tensor_model_parallel_rank(),
                    parallel_state.get_expert_model_parallel_rank(),
                    parallel_state.get_expert_tensor_parallel_rank(),
                )
                if place not in tables:
                    progress(f"Megatron-Core, rank {rank} of {count}")
                    tables[place] = _table(_stage_pieces(policy, shapes), shapes)
            finally:
                parallel_state.destroy_model_parallel()
        of_ranks.append(tables[place])
    return of_ranks


def _stage_pieces(policy: PolicyConfig, shapes: Shapes) -> list[Piece]:
    """Return the pieces of tensors on disk that this Megatron-Core rank holds."""
    from torch._subclasses import FakeTensorMode

    from pipeline.train.megatron.local_tensors import local_tensors
    from pipeline.train.megatron.model import build
    from pipeline.train.megatron.other_modalities import hold

    model = TextModel(model_config(policy))
    with FakeTensorMode(allow_non_fake_inputs=True):  # the rotary embeddings are computed, which the meta device cannot
        stage = build(policy, model.config)
        hold(stage, model.others, shapes)
    tensors = local_tensors(stage, model.parameters | model.others, shapes)
    return [piece for tensor in tensors.values() for piece in tensor.hugging_face]


def _vllm(policy: PolicyConfig, shapes: Shapes, progress: Progress) -> list[LayoutTable]:
    """Return the tables of the ranks of one engine, which all engines share."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    if not torch.cuda.is_available():
        platforms._current_platform = CpuPlatform()  # so that vLLM's build for GPUs describes its layouts here too
    from pipeline.generate.vllm_rank import record_rank

    size, tables = engine_ranks(policy.generation.vllm_cfg), []
    for rank in range(size):
        progress(f"vLLM, rank {rank} of {size}")
        pairs = [(region_, unit.name) for unit in record_rank(policy, shapes, rank, size) for region_ in unit.regions]
        tables.append(layout_table([region_ for region_, _ in pairs], shapes, [name for _, name in pairs]))
    return tables
