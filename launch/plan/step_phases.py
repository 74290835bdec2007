"""Combine the phases of training, generation and shared GPUs into a step, and estimate the time of a validation."""

from __future__ import annotations

from collections.abc import Mapping

from launch.plan import generate_time, gpu_check, memory, shared_gpus, train_time
from launch.plan.lengths import Lengths
from launch.plan.memory_parts import GenerateMemory
from launch.plan.phase import Phase
from pipeline import config
from pipeline.algorithms import build
from pipeline.config import Recipe
from pipeline.models.shape import ModelShape


def is_priced(recipe: Recipe) -> bool:
    """Return whether all components have GPUs, without which durations cannot be estimated."""
    return all(component.gpus_per_node for component in config.components(recipe).values())


def step_phases(
    recipe: Recipe,
    shapes: Mapping[str, ModelShape],
    lengths: Lengths,
    generate: GenerateMemory | None,
) -> list[Phase]:
    """Return the uncalibrated phases of a step in order, without the transfer of a refit."""
    train = train_time.phases(recipe, shapes, lengths, gpu_check.gpu(recipe, recipe.cluster.train))
    if generate is None:
        return train
    gpu = gpu_check.gpu(recipe, recipe.cluster.generate)
    phases = generate_time.phases(recipe, shapes["policy"], lengths, gpu, generate)
    answers = generate_time.rollout_size(recipe)[1]
    judge = recipe.cluster.reward if config.serves_rewards(recipe) else recipe.cluster.train
    score = train_time.reward_phase(recipe, shapes, lengths, gpu_check.gpu(recipe, judge), answers)
    phases += [score] if score else []
    phases += train
    if config.colocated(recipe):
        phases += shared_gpus.phases(recipe, memory.train(recipe, shapes), generate)
    return phases


def validation_seconds(
    recipe: Recipe, shapes: Mapping[str, ModelShape], lengths: Lengths, generate: GenerateMemory | None
) -> float | None:
    """Return the seconds of one validation; 0 if the recipe has none, None if max_val_samples sets no bound.

    Assumes a single validation data set with max_val_samples records. A record of preference data has two sequences, which the
    reference policy processes too.
    """
    algorithm = build(recipe)
    section = algorithm.section
    if not config.validates(recipe) or not (section.val_period > 0 or section.val_at_start or section.val_at_end):
        return 0.0
    samples = config.bound(section.max_val_samples)
    if samples is None:
        return None
    if generate is None:
        gpu = gpu_check.gpu(recipe, recipe.cluster.train)
        job = train_time.job(recipe, recipe.policy, shapes["policy"], lengths, gpu, recipe.cluster.train)
        count = samples * algorithm.sequences_per_item
        passes = 1 + algorithm.needs.reference
        return passes * sum(train_time.forward_pass(job, count)[1].values())
    gpu, count = gpu_check.gpu(recipe, recipe.cluster.generate), samples * section.val_num_generations_per_prompt
    return generate_time.validation(recipe, shapes["policy"], lengths, gpu, generate, count)
