"""Combine the phases of train ranks, engines and shared GPUs into a step, and estimate its time and that of a validation.

    in turn      rollout, training and refit follow each other
    drained      sampling runs ahead, and a refit waits for the engines: the longer of rollout and training, then the refit
    in flight    a refit does not wait for the engines

In flight, max_trajectory_age_steps + 1 rollouts overlap (`pipeline/coordination/buffer.py` with `stragglers: wait`): each refit
starts one, and a step waits for the oldest. A step then takes the longest of: training and refit; the time in which full
engines decode as many tokens as a rollout has, and a refit; and the time from the start of a rollout to its refit, divided by
the rollouts in flight. Engines do not decode during a refit. The longest answer decodes beside the answers of all rollouts,
whose number follows from the step (Little's law).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launch.plan import generate_time, gpu_check, memory, shared_gpus, train_time
from launch.plan.generate_time import EngineLoad, decoding
from launch.plan.lengths import Lengths
from launch.plan.memory_parts import GenerateMemory
from launch.plan.roofline import Phase
from pipeline import config
from pipeline.algorithms import build
from pipeline.config import Recipe, ahead, colocated, runs_ahead
from pipeline.models.shape import ModelShape

ROUNDS = 20  # in which a step and the number of sequences that decode at once approach each other


def is_priced(recipe: Recipe) -> bool:
    """Return whether all components with models have GPUs, without which durations cannot be estimated."""
    return all(component.gpus_per_node for component in config.model_components(recipe).values())


def phases(recipe: Recipe, shapes: Mapping[str, ModelShape], lengths: Lengths, generate: GenerateMemory | None) -> list[Phase]:
    """Return the uncalibrated phases of a step in order, without the transfer of a refit."""
    train = train_time.phases(recipe, shapes, lengths, gpu_check.gpu(recipe, recipe.cluster.train))
    if generate is None:
        return train
    gpu = gpu_check.gpu(recipe, recipe.cluster.generate)
    step_phases = generate_time.phases(recipe, shapes["policy"], lengths, gpu, generate)
    judge = recipe.cluster.reward if config.serves_rewards(recipe) else recipe.cluster.train
    answers = generate_time.rollout_size(recipe)[1]
    score = train_time.reward_phase(recipe, shapes, lengths, gpu_check.gpu(recipe, judge), answers)
    step_phases += [*([score] if score else []), *train]
    if colocated(recipe):
        step_phases += shared_gpus.phases(recipe, memory.train(recipe, shapes), generate)
    return step_phases


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
        work = train_time.forward_pass(job, samples * algorithm.sequences_per_item)
        return (1 + algorithm.needs.reference) * (1 + algorithm.needs.mismatched) * sum(work[1].values())
    gpu, count = gpu_check.gpu(recipe, recipe.cluster.generate), samples * section.val_num_generations_per_prompt
    return generate_time.validation(recipe, shapes["policy"], lengths, gpu, generate, count)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step, and the seconds of it in which each component is idle."""

    step: float
    train: float = 0.0
    generate: float = 0.0


def estimate(recipe: Recipe, seconds: Mapping[str, float], sampling: float, load: EngineLoad | None) -> StepTime:
    """Return the seconds of a step and the idle seconds of each component.

    seconds: clock -> seconds of its phases. sampling: the seconds of a rollout on the engines; in the rest of the rollout other
    ranks score answers, and the train ranks wait for them. load: the answers that an engine decodes in a rollout; None for an
    algorithm that does not sample.
    """
    rollout, train, refit = (seconds.get(clock, 0.0) for clock in ("rollout", "train", "refit"))
    if load is None or colocated(recipe):
        return StepTime(rollout + train + refit)
    if not runs_ahead(recipe):
        return StepTime(rollout + train + refit, rollout, train)
    section = ahead(recipe)
    if not section.in_flight_weight_updates:
        longer = max(rollout, train)
        return StepTime(longer + refit, longer - train, longer - rollout)
    step = in_flight(load, sampling, rollout - sampling + train, refit, section.max_trajectory_age_steps)
    return StepTime(step, max(0.0, step - train - refit), max(0.0, step - sampling - refit))


def in_flight(load: EngineLoad, sampling: float, train: float, refit: float, age: int) -> float:
    """Return the seconds of a step in which refits do not wait for the engines.

    sampling: seconds of a rollout that runs alone on the engine. train: seconds from a complete rollout to the refit.
    age: how many steps sampling runs ahead, at least 1.
    """
    lengths, rollouts = load.lengths, age + 1
    context = lengths.prompt + lengths.squared_answer / (2 * lengths.answer)
    scale = sampling / sum(decoding(load.engine, load.count, load.slots, lengths, load.answers).values())

    def token(batch: float) -> float:
        return scale * sum(load.engine.parts(batch, context).values())

    most = min(load.slots, rollouts * load.count)
    full, batch, step = load.count * lengths.answer / most * token(most), most, 0.0
    for _ in range(ROUNDS):
        oldest = max(sampling, lengths.longest(load.answers) * token(batch))
        step = max(train + refit, full + refit, (oldest + train) / rollouts + refit)
        batch = min(most, max(1.0, load.count / (step - refit) * lengths.answer * token(batch)))
    return step
