"""Estimate the memory of the fullest train rank in its fullest phase, over all models that it holds.

    memory_parts        the parts of memory; models and microbatches of the train ranks
    rank_memory         one model on one rank, with either backend
    activations         layers, the last norm and the head
    memory_generate     generate ranks: weights and KV cache
    advice              keys to change if a rank does not fit
`python -m tests.launch.plan memory` compares these figures with measured ones.

The estimate assumes the worst case: full microbatches, and all sequences of the greatest length. Not counted: fragmentation of
CUDA's allocator, copies for checkpoints that are written asynchronously, weights gathered for an export.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from launch.plan import memory_generate
from launch.plan.memory_parts import (
    RUNTIME,
    GenerateMemory,
    Parts,
    RankBatches,
    TrainMemory,
    TrainModel,
    add_parts,
    longest_sequence,
    models,
    optimizer_state,
    rank_batches,
)
from launch.plan.rank_division import Parallelism, engines, train_parallelism
from launch.plan.rank_memory import RankMemory, of_stages
from launch.preflight.tried_optimizers import optimizers
from pipeline.config import (
    PRECISIONS,
    Problem,
    Recipe,
    RecipeError,
    collected,
    generates,
    reward_environment,
    reward_model_policy,
    served_judge_policy,
    serves_judge,
    serves_rewards,
    uses_megatron,
)
from pipeline.models.shape import ModelShape


def train(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> TrainMemory:
    """Return the memory of the fullest train rank. shapes: section -> shape, for the sections of `pipeline.config.models`."""
    component, layout = recipe.cluster.train, train_parallelism(recipe.policy, recipe.cluster.train)
    cuda, of_rank = component.gpus_per_node > 0, rank_batches(recipe, layout.data)
    peak_memory = peak(models(recipe, shapes), layout, cuda, of_rank)
    fixed: Parts = {"buffers": of_rank.batch_bytes + staging(recipe, shapes["policy"], layout)}
    if cuda:
        fixed["runtime"] = RUNTIME
    phases = {name: size + sum(fixed.values()) for name, size in peak_memory.phases.items()}
    return TrainMemory(
        add_parts(peak_memory.parts, fixed),
        peak_memory.phase,
        phases,
        peak_memory.host,
        _assumptions(recipe, of_rank, cuda),
        shapes,
    )


def reward(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> TrainMemory | None:
    """Return the memory of the fullest reward rank; None if the reward model has no ranks of its own."""
    if not serves_rewards(recipe):
        return None
    policy, component = reward_model_policy(recipe), recipe.cluster.reward
    layout, cuda = train_parallelism(policy, component), component.gpus_per_node > 0
    model = TrainModel(policy, shapes[f"env.{reward_environment(recipe)}"], values=True, trained=False)
    peak_memory = peak([model], layout, cuda, rank_batches(recipe, layout.data))
    return replace(peak_memory, parts=add_parts(peak_memory.parts, {"runtime": RUNTIME} if cuda else {}), shapes=shapes)


def judge(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> GenerateMemory | None:
    """Return the memory of the fullest judge rank; None if no generative judge has ranks of its own."""
    if not serves_judge(recipe):
        return None
    problems: list[Problem] = []
    with collected(problems):
        return memory_generate.generate(of_judge(recipe), shapes["judge"])
    raise RecipeError(*map(named_of_judge, problems))


def of_judge(recipe: Recipe) -> Recipe:
    """Return a recipe whose engines are those of the judge. It evaluates, as they get no refit."""
    cluster = replace(recipe.cluster, generate=recipe.cluster.judge)
    return replace(recipe, algorithm="evaluate", policy=served_judge_policy(recipe), cluster=cluster)


def named_of_judge(problem: Problem) -> Problem:
    """Return a problem of `of_judge` with the keys of the recipe itself."""
    return Problem(problem.key.replace("policy.generation.", "judge."), problem.code, text_of_judge(problem.message))


def text_of_judge(text: str) -> str:
    """Return a text about generate ranks as one about judge ranks."""
    for ours, its in (("policy.generation.", "judge."), ("cluster.generate", "cluster.judge"), ("a generate", "a judge")):
        text = text.replace(ours, its)
    return text


def peak(models: Sequence[TrainModel], layout: Parallelism, cuda: bool, of_rank: RankBatches) -> TrainMemory:
    """Return the memory of the fullest rank for its models alone, without packed batches, refit staging and runtime.

    models: the policy first. of_rank: the microbatches of a data-parallel rank.
    """
    fullest: TrainMemory | None = None
    for stage_number, of_stage in enumerate(
        zip(*(of_stages(model, layout, cuda, uses_megatron(model.policy)) for model in models), strict=True)
    ):
        stage = f" (pipeline stage {stage_number})" if layout.pipeline > 1 else ""
        phases = {f"{name}{stage}": parts for name, parts in _phases(of_stage, cuda, of_rank)}
        sizes = {name: sum(parts.values()) for name, parts in phases.items()}
        phase = max(sizes, key=sizes.__getitem__)
        if fullest is None or sizes[phase] > fullest.total:
            fullest = TrainMemory(phases[phase], phase, sizes, sum(stage_memory.host for stage_memory in of_stage), (), {})
    assert fullest is not None  # a pipeline has at least one stage
    return fullest


def _phases(of_stage: Sequence[RankMemory], cuda: bool, of_rank: RankBatches) -> Iterator[tuple[str, Parts]]:
    """Yield (phase, parts of memory) for the phases of each model. The parts include the resident memory of all models."""
    policy, *other_memories = of_stage
    besides = sum(sum(model_memory.resident.values()) for model_memory in other_memories)
    if not cuda:
        besides += sum(stage_memory.host for stage_memory in of_stage)
    resident = add_parts(policy.resident, {"other models": besides})
    for stage_memory in of_stage:
        name = "policy" if stage_memory is policy else "other model"
        for phase, parts in stage_memory.phases(of_rank):
            yield f"{phase}, {name}", add_parts(resident, parts)


def staging(recipe: Recipe, shape: ModelShape, layout: Parallelism) -> float:
    """Return the bytes in which a train rank stages a refit, by refit_transport.

    Planned: the buffers of two rounds (`pipeline.refit.planned`), each at most a bucket, and at most all bytes that the rank
    sends. Broadcast: one bucket and one tensor. Delta: as planned, plus the weights that the rank sent last.
    """
    if not generates(recipe):
        return 0.0
    generation, size = recipe.policy.generation, PRECISIONS[recipe.policy.precision]
    bucket = generation.refit_cfg.bucket_bytes
    if generation.refit_transport == "broadcast":
        return bucket + size * max(shape.output, shape.embedding - shape.output)
    sent_bytes = size * shape.parameters * engines(recipe.policy, recipe.cluster.generate) / layout.ranks
    return 2 * min(bucket, sent_bytes) + (sent_bytes if generation.refit_transport == "delta" else 0.0)


def _assumptions(recipe: Recipe, of_rank: RankBatches, cuda: bool) -> tuple[str, ...]:
    assumptions = [
        f"microbatches of {of_rank.train_tokens:,} tokens with a gradient and {of_rank.forward_tokens:,} without",
        f"packed batches in which all sequences of a step have {longest_sequence(recipe):,} tokens ({_longest_source(recipe)})",
    ]
    assumptions += [why for optimizer in optimizers(recipe).values() if (why := optimizer_state(recipe, optimizer)[1])]
    if cuda:
        assumptions.append(f"{RUNTIME / 2**30:g} GiB for CUDA's context, libraries and NCCL; no fragmentation")
        if uses_megatron(recipe.policy):
            assumptions.append("TransformerEngine is installed; tokens spread evenly over experts")
    return tuple(assumptions)


def _longest_source(recipe: Recipe) -> str:
    """Return a text with the key that sets the longest sequence, for which memory is estimated."""
    longest = longest_sequence(recipe)
    if longest == recipe.policy.max_total_sequence_length:
        hint = "; if all records are shorter, set data.max_input_seq_length or plan.longest_tokens" * (not generates(recipe))
        return f"policy.max_total_sequence_length{hint}"
    limited = longest == recipe.data.max_input_seq_length
    return "data.max_input_seq_length" if limited else "plan.longest_tokens"
