"""Calibrate a plan with the durations and sequence lengths of an earlier run.

Each predicted clock is multiplied by the ratio of the earlier run's measured seconds to the seconds that the time model gives
for that run's recipe and sequence lengths. The plan of the same recipe therefore equals the measurement. The plan of another
recipe errs only where the two runs differ in costs that the time model leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from launch.plan.rank_division import parallel_sizes, train_parallelism
from launch.plan.roofline import CLOCKS, Phase
from pipeline import config
from pipeline.algorithms import build
from pipeline.config import Problem, Recipe, RecipeError, generates, runs_ahead
from pipeline.observe.metrics import read


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Means over the steps of a run. The first step, which warms up, is left out unless it is the only one."""

    folder: Path
    recipe: Recipe
    steps: int
    clocks: dict[str, float]  # seconds by CLOCKS
    step: float  # seconds
    answer: float | None  # mean tokens; for an offline algorithm, of the whole sequence
    prompt: float | None

    @property
    def where(self) -> str:
        """Return a text with the run folder and its number of measured steps, for the plan's table."""
        return f"{self.folder} ({self.steps} step{'s' * (self.steps > 1)})"


def read_run(folder: Path) -> MeasuredRun | None:
    """Return the means over a run's steps; None if the folder has no complete step.

    Raises RecipeError if its recipe cannot be read.
    """
    lines = [line for line in read(folder / "metrics.jsonl") if line.get("time/step")]
    if not lines or not (folder / "recipe.yaml").is_file():
        return None
    lines = lines[1:] or lines
    recipe = config.read(folder / "recipe.yaml")
    clocks = {clock: value for clock in CLOCKS if (value := _mean(lines, f"time/{clock}")) is not None}
    step = fmean(line["time/step"] for line in lines)
    tokens = [line["throughput/tokens_per_s"] * line["time/step"] for line in lines if line.get("throughput/tokens_per_s")]
    answer, prompt = (fmean(tokens) / build(recipe).samples_per_step if tokens else None), None
    if generates(recipe):
        sequence, answer = answer, _mean(lines, "train/completion_tokens")
        prompt = max(1.0, sequence - answer) if sequence and answer else None
    return MeasuredRun(folder, recipe, len(lines), clocks, step, answer, prompt)


def _mean(lines: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return fmean(values) if values else None


def find(recipe: Recipe, before: Path | None) -> MeasuredRun | None:
    """Return the run to calibrate by: the one in the folder `before` or, if that is None, in the recipe's run folder.

    Return None if the recipe's run folder has no complete step. Raises RecipeError if `before` has none, and if only one of the
    two algorithms samples, whose lengths and clocks cannot be compared.
    """
    if before is None:
        return read_run(Path(recipe.run_dir))
    run = read_run(before)
    if run is None:
        message = (
            f"got {before}; expected a run folder with recipe.yaml and with time/step in metrics.jsonl. Try the folder of a"
            " run that has completed steps"
        )
        raise RecipeError(Problem("plan_from", "no-records", message))
    if generates(run.recipe) != generates(recipe):
        kind = "an algorithm that samples" if generates(recipe) else "an offline algorithm"
        message = f"got {before}, a run of {run.recipe.algorithm}; expected a run of {kind}, such as {recipe.algorithm}"
        raise RecipeError(Problem("plan_from", "contradiction", message))
    return run


def differences(measured: Recipe, planned: Recipe, same_model: bool) -> list[str]:
    """Return texts of what a measured run has otherwise than a planned one: its algorithm, model, GPU and layout."""
    gpus = _gpus(measured)
    differs = {
        f"algorithm ({measured.algorithm})": measured.algorithm != planned.algorithm,
        f"model ({measured.policy.model_name})": not same_model,
        f"GPU ({' and '.join(sorted(gpus))})": gpus != _gpus(planned),
        "layout": _layout(measured) != _layout(planned),
    }
    return [text for text, is_other in differs.items() if is_other]


def _gpus(recipe: Recipe) -> set[str]:
    return {component.gpu for component in config.model_components(recipe).values()}


def _layout(recipe: Recipe) -> tuple[object, ...]:
    """Return what decides how the ranks of a recipe divide its models."""
    policy, parts = recipe.policy, config.components(recipe)
    ranks = {name: (config.ranks(on), config.ranks_per_node(on)) for name, on in parts.items()}
    sharing = config.colocated(recipe), runs_ahead(recipe), recipe.cluster.share_nodes
    trained = config.uses_megatron(policy), train_parallelism(policy, recipe.cluster.train)
    return ranks, sharing, trained, parallel_sizes(policy.generation.vllm_cfg) if generates(recipe) else ""


def ratios(measured: MeasuredRun, predicted: Mapping[str, float]) -> dict[str, float]:
    """Return clock -> its measured seconds / its predicted seconds. predicted: clock -> seconds planned for the measured run.

    If sampling ran ahead of training, the rollout clock is left out, because it measures only the wait for samples.
    """
    comparable = measured.clocks.keys() - ({"rollout"} if runs_ahead(measured.recipe) else set())
    return {clock: measured.clocks[clock] / seconds for clock, seconds in predicted.items() if clock in comparable}


def scale(phases: Sequence[Phase], ratios: Mapping[str, float]) -> list[Phase]:
    """Return the phases with each duration multiplied by the ratio of its clock. A clock without a ratio has the ratio 1."""
    return [
        Phase(p.clock, p.name, p.flops, {name: ratios.get(p.clock, 1.0) * seconds for name, seconds in p.parts.items()})
        for p in phases
    ]
