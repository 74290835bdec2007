"""Memory of the fullest train rank: every phase of every model it holds, with what all of them hold all the time.

Backends: `memory_fsdp.py` and `memory_megatron.py`, on the activations of `activations.py` and the head of `memory_head.py`.
What is not known before a run is taken at its worst: microbatches are full, all sequences are the longest. Left out: the
fragmentation of CUDA's allocator, copies for checkpoints that are written behind training, weights gathered for an export.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from launch.model_shape import ModelShape
from launch.plan.cut import Cut, engines, train_cut
from launch.plan.memory_fsdp import FSDP
from launch.plan.memory_load import Load, Model, load, models
from launch.plan.memory_megatron import Megatron, stages
from launch.plan.memory_parts import RUNTIME, Parts, TrainMemory, add
from pipeline.config import (
    PRECISIONS,
    Recipe,
    generates,
    reward_environment,
    reward_model_policy,
    serves_rewards,
    uses_megatron,
)

Held = FSDP | Megatron


def train(recipe: Recipe, shapes: dict[str, ModelShape]) -> TrainMemory:
    """Of the fullest train rank. shapes: by the sections of `pipeline.config.models(recipe)`."""
    component, cut = recipe.cluster.train, train_cut(recipe.policy, recipe.cluster.train)
    cuda, of_rank = component.gpus_per_node > 0, load(recipe, cut.data)
    found = peak(models(recipe, shapes), cut, cuda, of_rank)
    fixed: Parts = {"buffers": of_rank.batch_bytes + staging(recipe, shapes["policy"], cut)}
    if cuda:
        fixed["runtime"] = RUNTIME
    phases = {name: size + sum(fixed.values()) for name, size in found.phases.items()}
    return TrainMemory(add(found.parts, fixed), found.phase, phases, found.host, _assumptions(recipe, of_rank, cuda), shapes)


def reward(recipe: Recipe, shapes: dict[str, ModelShape]) -> TrainMemory | None:
    """Return the memory of the fullest reward rank; None if the reward model has no ranks of its own."""
    if not serves_rewards(recipe):
        return None
    policy, component = reward_model_policy(recipe), recipe.cluster.reward
    cut, cuda = train_cut(policy, component), component.gpus_per_node > 0
    model = Model(policy, shapes[f"env.{reward_environment(recipe)}"], values=True, trained=False)
    found = peak([model], cut, cuda, load(recipe, cut.data))
    return replace(found, parts=add(found.parts, {"runtime": RUNTIME} if cuda else {}), shapes=shapes)


def peak(models: list[Model], cut: Cut, cuda: bool, of_rank: Load) -> TrainMemory:
    """Of the models alone, the policy first: without packed batches, refit and runtime."""
    places = [[_held(model, cut, cuda, place) for model in models] for place in range(cut.pipeline)]
    best: TrainMemory | None = None
    for place, held in enumerate(places):
        stage = f" (pipeline stage {place})" if len(places) > 1 else ""
        phases = {f"{name}{stage}": parts for name, parts in _phases(held, cuda, of_rank)}
        sizes = {name: sum(parts.values()) for name, parts in phases.items()}
        phase = max(sizes, key=sizes.get)
        if best is None or sizes[phase] > best.total:
            best = TrainMemory(phases[phase], phase, sizes, sum(one.host for one in held), (), {})
    return best


def _held(model: Model, cut: Cut, cuda: bool, place: int) -> Held:
    if uses_megatron(model.policy):
        return Megatron(model, cut, cuda, stages(model)[place])
    return FSDP(model, cut, cuda)


def _phases(held: list[Held], cuda: bool, of_rank: Load) -> Iterator[tuple[str, Parts]]:
    """Each model's, with what all models hold all the time."""
    policy, *others = held
    besides = sum(sum(other.resident.values()) for other in others)
    if not cuda:
        besides += sum(one.host for one in held)
    resident = add(policy.resident, {"other models": besides})
    for one, name in zip(held, ("policy", *("other model" for _ in others)), strict=True):
        for phase, parts in one.phases(of_rank):
            yield f"{phase}, {name}", add(resident, parts)


def staging(recipe: Recipe, shape: ModelShape, cut: Cut) -> float:
    """What a train rank packs a refit in: two rounds' buffers (`pipeline.refit.planned`), each at most all that it sends; one
    bucket and one tensor for a broadcast; for deltas also what it sent last."""
    if not generates(recipe):
        return 0.0
    generation, size = recipe.policy.generation, PRECISIONS[recipe.policy.precision]
    bucket = generation.refit_cfg.bucket_bytes
    if generation.refit_transport == "broadcast":
        return bucket + size * max(shape.output, shape.embedding - shape.output)
    sent = size * shape.parameters * engines(recipe.policy, recipe.cluster.generate) / cut.ranks
    return 2 * min(bucket, sent) + (sent if generation.refit_transport == "delta" else 0.0)


def _assumptions(recipe: Recipe, of_rank: Load, cuda: bool) -> tuple[str, ...]:
    found = [
        f"microbatches of {of_rank.train_tokens:,} tokens with a gradient and {of_rank.forward_tokens:,} without",
        "all sequences of a step at policy.max_total_sequence_length, in its packed batches",
    ]
    if cuda:
        found.append(f"{RUNTIME / 2**30:g} GiB for CUDA's context, libraries and NCCL; no fragmentation")
        if uses_megatron(recipe.policy):
            found.append("TransformerEngine is installed; tokens spread evenly over experts")
    return tuple(found)
