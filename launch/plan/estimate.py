"""Build the plan of one recipe: memory, refit, durations, calibration, and whether it fits."""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from launch.plan import (
    advice,
    backend_choice,
    calibration,
    data_lengths,
    generate_time,
    gpu_check,
    lengths,
    memory,
    memory_generate,
    recomputation,
    refit,
    shared_gpus,
    step_time,
)
from launch.plan.calibration import MeasuredRun
from launch.plan.lengths import Lengths
from launch.plan.memory_parts import GenerateMemory, TrainMemory
from launch.plan.rank_division import GIGA
from launch.plan.refit import RefitEstimate
from launch.plan.roofline import Phase, seconds_by_clock
from launch.plan.step_time import StepTime
from launch.preflight.file_systems import saved_bytes
from launch.recipes import reading
from launch.recipes.model_files import is_inside, planning_config
from pipeline import config
from pipeline.config import Problem, Recipe, RecipeError, collected, generates, hardware, ranks, section, uses_megatron
from pipeline.config.schema import PlanConfig
from pipeline.models.shape import ModelShape

STATE = ("weights", "merged weights", "gradients", "optimizer")  # parts that depend on no batch size or recomputation


@dataclass(frozen=True)
class Plan:
    """The plan of one recipe: memory, durations, and whether it fits."""

    recipe: Recipe
    choice: backend_choice.BackendChoice
    models: Mapping[str, Mapping[str, Any]]  # config.json, by the sections of config.models
    shapes: Mapping[str, ModelShape]  # by the sections of config.models
    lengths: Lengths
    train: TrainMemory
    generate: GenerateMemory | None  # None: an algorithm that does not sample
    reward: TrainMemory | None  # None: the reward model has no ranks of its own
    judge: GenerateMemory | None  # None: no generative judge has ranks of its own
    measured: MeasuredRun | None
    refit: RefitEstimate | None = None  # None: an algorithm that does not sample
    phases: Sequence[Phase] = ()  # phases of a step, calibrated; empty without GPUs, or without room for a KV cache
    validation: float | None = 0.0  # seconds of a validation, 0 if the recipe has none; None: max_val_samples sets no bound
    ratios: Mapping[str, float] = field(default_factory=dict)  # measured / predicted, by clock that is calibrated
    differences: Sequence[str] = ()  # what the measured run has otherwise

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Return the predicted seconds of a step by clock, see `roofline.CLOCKS`."""
        return seconds_by_clock(self.phases)

    @cached_property
    def step_time(self) -> StepTime:
        """Return the seconds of a step and, within them, the idle seconds of each component."""
        load, recipe = None, self.recipe
        if self.generate and self.phases:
            gpu = gpu_check.gpu(recipe, recipe.cluster.generate)
            load = generate_time.load(recipe, self.shapes["policy"], self.lengths, gpu, self.generate)
        sampling = sum(phase.seconds for phase in self.phases if phase.name in generate_time.SAMPLING)
        return step_time.estimate(recipe, self.seconds, sampling, load)

    @property
    def step(self) -> float:
        """Return the seconds of a step."""
        return self.step_time.step

    @property
    def steps(self) -> int | None:
        """Return the number of steps of the run; None if the run ends with its data, whose size the plan does not know."""
        return config.bound(section(self.recipe).max_num_steps)

    @property
    def validations(self) -> int | None:
        """Return how many validations the run makes; None if its number of steps is not known."""
        if not config.validates(self.recipe):
            return 0
        return None if self.steps is None else self._validations(self.steps)

    def _validations(self, steps: int) -> int:
        """Return how many validations the first `steps` steps of a run with validations have."""
        algorithm = section(self.recipe)
        period = algorithm.val_period
        at_end = steps == self.steps and algorithm.val_at_end and not (period > 0 and steps % period == 0)
        return (steps // period if period > 0 else 0) + algorithm.val_at_start + at_end

    @property
    def total(self) -> float | None:
        """Return the seconds of the run, as `duration` does; None if its number of steps is not known."""
        return None if self.steps is None else self.duration(self.steps)

    def duration(self, steps: int) -> float:
        """Return the seconds of the first `steps` steps, with their validations and the first refit.

        They exclude the queue, the start, checkpoints, and validations whose number of samples has no bound.
        """
        validations = self._validations(steps) if config.validates(self.recipe) else 0
        return steps * self.step + validations * (self.validation or 0.0) + self.seconds.get("refit", 0.0)

    @property
    def steps_in_limit(self) -> int:
        """Return how many steps, with their validations, the time limit of a submission holds."""
        limit = 60 * self.recipe.cluster.time_min
        most = int(limit / self.step) if self.steps is None else min(self.steps, int(limit / self.step))
        return max(0, bisect.bisect_right(range(most + 1), limit, key=self.duration) - 1)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of the job. GPUs that colocated components share count once."""
        guests = {"generate"} if config.colocated(self.recipe) else set()
        return sum(c.nodes * c.gpus_per_node for name, c in config.components(self.recipe).items() if name not in guests)

    @cached_property
    def turns(self) -> tuple[shared_gpus.TurnMemory, ...]:
        """Return, for each turn, the memory of a GPU that a train rank and a generate rank share; empty if none is shared."""
        if self.generate is None or not config.colocated(self.recipe) or not self.recipe.cluster.train.gpus_per_node:
            return ()
        return shared_gpus.turns(self.recipe, self.train, self.generate)

    @property
    def host(self) -> float:
        """Return the bytes of host memory of a train rank, and of the generate rank on the same GPU if there is one."""
        if self.generate is None or not self.turns:
            return self.train.host
        return shared_gpus.host(self.recipe, self.train, self.generate)

    @property
    def gpu_hours(self) -> float | None:
        """Return the GPU-hours of `total`; None if `total` is None."""
        return None if self.total is None else self.gpus * self.total / 3600

    @property
    def submissions(self) -> int | None:
        """Return how many submissions of cluster.time_min each the run needs.

        None if its number of steps is not known, or if the limit holds no step.
        """
        if self.steps is None:
            return None
        holds = self.steps_in_limit
        return 1 if self.steps <= holds else math.ceil(self.steps / holds) if holds else None

    @property
    def checkpoint_bytes(self) -> float | None:
        """Return the bytes of a checkpoint; None if checkpoints contain only adapters."""
        if config.adapters(self.recipe.policy):
            return None
        trained = {name: model for name, model in config.models(self.recipe).items() if name in ("policy", "value")}
        return sum(saved_bytes(model, self.shapes[name].parameters) for name, model in trained.items())

    @property
    def checkpoints(self) -> int | None:
        """Return how many checkpoints the run saves; None if its number of steps is not known."""
        saving = self.recipe.checkpointing
        if not saving.enabled:
            return 0
        return None if self.steps is None else math.ceil(self.steps / saving.save_period)

    # ---- durations -----------------------------------------------------------------------------------------------------------

    @property
    def is_timed(self) -> bool:
        """Return whether durations can be estimated: all components have GPUs, and engines have room for a KV cache."""
        return step_time.is_priced(self.recipe) and (self.generate is None or self.generate.tokens > 0)

    def timed(self) -> Plan:
        """Return the plan with durations if they can be estimated, else unchanged."""
        if not self.is_timed:
            return self
        recipe, ratios = self.recipe, self.ratios
        arguments = recipe, self.shapes, self.lengths, self.generate
        phases = calibration.scale([*step_time.phases(*arguments), *_refit_phases(recipe, self.refit)], ratios)
        validation = step_time.validation_seconds(*arguments)
        if validation is not None:
            validation *= ratios.get("rollout" if generates(recipe) else "train", 1.0)
        return replace(self, phases=phases, validation=validation)

    def elsewhere(self, recipe: Recipe) -> Plan:
        """Return the plan of `recipe`, a variant of this plan's recipe, with the same models, lengths and calibration.

        The returned plan has no phases if it does not fit. Raises RecipeError.
        """
        recipe = recomputation.again(recipe, self.choice.open_keys, self.shapes, self.lengths)
        memories = _memories(recipe, self.shapes)
        transfer = _refit(recipe, self.shapes, memories["generate"])
        estimate = replace(self, recipe=recipe, phases=[], validation=0.0, refit=transfer, **memories)
        return estimate.timed() if estimate.fits else estimate

    # ---- whether it fits --------------------------------------------------------------------------------------------------

    @property
    def fits(self) -> bool:
        """Return whether there are neither problems nor warnings."""
        return not any(self.problems()) and not any(self.warnings())

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if the train ranks' state exceeds a GPU's memory by itself, and if the generate ranks' weights do."""
        train = self.recipe.cluster.train
        state = sum(self.train.parts.get(name, 0.0) for name in STATE)
        if _exceeds(train, state):
            key, remedy = _cut_key(self.recipe)
            message = (
                f"weights, gradients and optimizer state take {state / GIGA:.4g} GB on a train rank; expected at most the"
                f" {hardware.memory_gb(train):g} GB of its GPU (cluster.train.gpu, gpu_memory_gb). Try {remedy}"
            )
            yield Problem(key, "out-of-memory", message)
        if self.generate:
            yield from memory_generate.weights_problems(self.recipe, self.generate)
        if self.judge:
            yield from map(memory.named_of_judge, memory_generate.weights_problems(memory.of_judge(self.recipe), self.judge))

    def warnings(self) -> Iterator[str]:
        """Yield a warning for each rank whose estimated memory exceeds its GPU; none if there are problems."""
        if any(self.problems()):
            return
        cluster, generate = self.recipe.cluster, self.generate
        if _exceeds(cluster.train, self.train.total):
            yield f"a train rank may need {_of_gpu(self.train.total, cluster.train, self.train.phase)}"
        if generate and cluster.generate.gpus_per_node and generate.sequences < 1:  # vLLM may refuse to start
            yield memory_generate.small_cache(self.recipe, generate)
        elif generate and _exceeds(cluster.generate, generate.total):
            yield f"a generate rank may need {_of_gpu(generate.total, cluster.generate)}"
        if self.reward and _exceeds(cluster.reward, self.reward.total):
            more = "Try a larger cluster.reward.nodes or cluster.reward.gpus_per_node"
            yield f"a reward rank may need {_of_gpu(self.reward.total, cluster.reward)}. {more}"
        if self.judge and cluster.judge.gpus_per_node and self.judge.sequences < 1:
            yield memory.text_of_judge(memory_generate.small_cache(memory.of_judge(self.recipe), self.judge))
        elif self.judge and _exceeds(cluster.judge, self.judge.total):
            yield f"a judge rank may need {_of_gpu(self.judge.total, cluster.judge)}"
        for turn in self.turns:
            if _exceeds(cluster.train, turn.total):
                yield (
                    f"a GPU may need {turn.total / GIGA:.0f} GB in the {turn.name} ({turn.train / GIGA:.0f} of the train rank,"
                    f" {turn.generate / GIGA:.0f} of the generate rank), and has {hardware.memory_gb(cluster.train):g} GB"
                )

    def advice(self) -> list[str]:
        """Return texts of changes with which ranks would fit, first for train ranks, then for generate ranks."""
        texts = []
        besides = {turn.name: turn for turn in self.turns}
        for memory_needed, component in (
            (self.train, self.recipe.cluster.train),
            (self.generate, self.recipe.cluster.generate),
        ):
            if memory_needed is not None and component.gpus_per_node:
                room = hardware.memory_gb(component) * GIGA
                if besides:  # the inactive rank keeps some memory
                    room -= besides["training"].generate if memory_needed is self.train else besides["rollout"].train
                texts += advice.advice(self.recipe, memory_needed, room)
        return texts


def _exceeds(component: config.ComponentConfig, count: float) -> bool:
    """Return whether `count` bytes exceed a GPU's memory; False for a component without GPUs."""
    return component.gpus_per_node > 0 and count > hardware.memory_gb(component) * GIGA


def _of_gpu(count: float, component: config.ComponentConfig, phase: str = "") -> str:
    return f"{count / GIGA:.0f} GB{f' in {phase}' if phase else ''}, and its GPU has {hardware.memory_gb(component):g} GB"


def plan(
    recipe: Recipe, choice: backend_choice.BackendChoice, before: Path | None = None, pending: Sequence[os.PathLike] = ()
) -> Plan:
    """Return the plan of a recipe for which the train backend is chosen.

    before: a run folder to calibrate by; None: the recipe's own run folder, if its run has made steps. pending: run folders of
    needed recipes that have not run yet. Raises RecipeError, which names the key, for an unknown model or GPU, a `before`
    without a complete step, or a plan.hardware that does not measure the recipe's GPUs.
    """
    recipe = gpu_check.with_measured_memory(recipe)
    models = model_configs(recipe, pending)
    shapes = _shapes(models)
    earlier = calibration.find(recipe, before)
    means = (earlier.prompt, earlier.answer, earlier.where) if earlier else (None, None, "")
    memories = _memories(recipe, shapes)
    estimate = Plan(
        recipe=recipe,
        choice=choice,
        models=models,
        shapes=shapes,
        lengths=lengths.assume(recipe, *means, data=data_lengths.measure(recipe, pending)),
        **memories,
        refit=_refit(recipe, shapes, memories["generate"]),
        measured=earlier,
    )
    if earlier:
        differences = _differences(earlier.recipe, recipe, shapes, pending)
        ratios = _ratios(earlier, pending, recipe) if estimate.is_timed else {}
        estimate = replace(estimate, ratios=ratios, differences=differences)
    return estimate.timed()


def _memories(recipe: Recipe, shapes: Mapping[str, ModelShape]) -> dict[str, Any]:
    """Return the fields of a plan with the memory of the fullest rank of each component."""
    generate = memory_generate.generate(recipe, shapes["policy"]) if generates(recipe) else None
    others = {"reward": memory.reward(recipe, shapes), "judge": memory.judge(recipe, shapes)}
    return {"train": memory.train(recipe, shapes), "generate": generate, **others}


def model_configs(recipe: Recipe, pending: Sequence[os.PathLike]) -> dict[str, Mapping[str, Any]]:
    """Return section -> config.json of its model, for all models of the train ranks and the judge. Raises RecipeError.

    For a model that a needed recipe has not written yet, it is the config.json of the model that the needed recipe starts from.
    """
    configs = {}
    for name, policy in (config.models(recipe) | config.served_models(recipe)).items():
        key = f"{name}.model_name"
        model = planning_config(policy, list(pending), key)
        if model is None:
            start = needed_model(replace(recipe, policy=policy))
            if start is None:
                message = f"{policy.model_name} does not exist yet, and no recipe in `needs` writes it"
                raise RecipeError(Problem(key, "unavailable-model", message))
            model = planning_config(replace(policy, model_name=start), [], key)
        configs[name] = model
    return configs


def needed_model(recipe: Recipe) -> str | None:
    """Return the name of the model that a needed recipe will train into this recipe's policy.

    If that recipe starts from another needed recipe's output, return the first model of the chain. Return None if the policy
    exists, or if no needed recipe writes it.
    """
    if Path(recipe.policy.model_name).is_dir():
        return None
    for name in recipe.needs:
        needed_recipe = reading.load(name, [f"run_dir=runs/{config.name_of(name)}"])
        if is_inside(recipe.policy.model_name, [Path(needed_recipe.run_dir)]):
            return needed_model(needed_recipe) or needed_recipe.policy.model_name
    return None


def _shapes(models: Mapping[str, Mapping[str, Any]]) -> dict[str, ModelShape]:
    return {name: ModelShape.of(model, f"{name}.model_name") for name, model in models.items()}


def _refit(recipe: Recipe, shapes: Mapping[str, ModelShape], generate: GenerateMemory | None) -> RefitEstimate | None:
    """Return the estimate of a refit; None for an algorithm that does not sample."""
    return refit.estimate(recipe, shapes["policy"], generate.received) if generate else None


def _refit_phases(recipe: Recipe, estimate: RefitEstimate | None) -> list[Phase]:
    """Return the uncalibrated phases of a refit's transfer."""
    if estimate is None:
        return []
    if config.colocated(recipe):
        return [shared_gpus.refit(recipe, estimate.received)]
    return [Phase("refit", "weights to the engines", 0.0, {"transfer": estimate.seconds})]


def _ratios(measured: MeasuredRun, pending: Sequence[os.PathLike], planned: Recipe) -> dict[str, float]:
    """Return clock -> measured / predicted seconds of an earlier run, predicted from its own recipe and sequence lengths.

    planned: the recipe whose plan these ratios calibrate. Its plan.hardware also applies to the earlier run's prediction if
    both runs have the same kinds of GPUs.
    """
    kinds = [{component.gpu for component in config.model_components(run).values()} for run in (measured.recipe, planned)]
    measured_hardware = planned.plan.hardware if kinds[0] == kinds[1] else None
    recipe = replace(measured.recipe, plan=PlanConfig(hardware=measured_hardware))
    if not step_time.is_priced(recipe):
        return {}
    models = model_configs(recipe, pending)
    shapes = _shapes(models)
    spread = lengths.assume(recipe, measured.prompt, measured.answer, measured.where)
    generate = memory_generate.generate(recipe, shapes["policy"]) if generates(recipe) else None
    phases = step_time.phases(recipe, shapes, spread, generate)
    transfer = _refit_phases(recipe, _refit(recipe, shapes, generate))
    return calibration.ratios(measured, seconds_by_clock([*phases, *transfer]))


def _differences(
    measured: Recipe, planned: Recipe, shapes: Mapping[str, ModelShape], pending: Sequence[os.PathLike]
) -> list[str]:
    """Return `calibration.differences`. A model of the measured run that is no longer here is judged by its name."""
    same_model = measured.policy.model_name == planned.policy.model_name
    with collected([]):
        same_model = _shapes(model_configs(measured, pending))["policy"] == shapes["policy"]
    return calibration.differences(measured, planned, same_model)


def _cut_key(recipe: Recipe) -> tuple[str, str]:
    """Return (the key that divides the train ranks' state further, words for what to try)."""
    if not uses_megatron(recipe.policy) or ranks(recipe.cluster.train) == 1:
        return "cluster.train.nodes", "more nodes"
    return "policy.megatron_cfg.pipeline_model_parallel_size", "a larger value, or a larger tensor_model_parallel_size"
