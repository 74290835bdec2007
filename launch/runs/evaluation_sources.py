"""Find the model or checkpoint to evaluate, and the recipe's keys that an evaluation takes from its run.

An evaluation of a run takes these keys: those of the policy, without the keys that only training reads; those of the generate
component, or of the train component if the run does not sample; and some keys of the cluster, checkpointing and the user's
modules. The suite gives all other keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.runs import waiting_checkpoints
from launch.runs.run_folder import read_recipe
from pipeline import config
from pipeline.checkpoints import checkpoint
from pipeline.checkpoints.checkpoint import Checkpoint
from pipeline.config import Problem, Recipe, RecipeError, generates

FOLDER = "evaluations"
"""Folder of evaluations in a run folder: evaluations/SUITE/step_000050 is the run folder of one evaluation."""
POLICY = ("model_name", "random_init", "tokenizer", "hf_config_overrides", "precision", "max_total_sequence_length")
GENERATION = ("backend", "stop_token_ids", "max_num_seqs", "vllm_cfg", "vllm_kwargs")
CLUSTER = ("executor", "audit", "time_min", "requeue", "node_checks", "sbatch_options", "network", "timeouts")


@dataclass(frozen=True)
class Source:
    """The model or checkpoint to evaluate."""

    values: dict[str, Any]  # nested keys of the recipe, over those of the suite
    origin: str  # where the values are from, for show=true
    run_dir: Path  # of the evaluation
    name: str  # for people
    checkpoint: Path | None = None  # the run's own, which `kept.keep` keeps until it is evaluated


def of_model(name: str, suite: str) -> Source:
    """Return a model as a source. name: a folder, or a name on the Hugging Face Hub. suite: the suite's name."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        name = str(folder.absolute())
        parts = folder.absolute().parts[-2:] if folder.name == "hf" else (folder.name,)
    else:
        parts = tuple(name.split("/"))
    folder_name = re.sub(r"[^\w.-]+", "_", "--".join(parts)) or "model"
    return Source({"policy": {"model_name": name}}, "model=", Path("runs/evaluations").absolute() / suite / folder_name, name)


def read_run(run_dir: Path) -> Recipe:
    """Return the recipe of a run that trains. Raises RecipeError."""
    recipe = read_recipe(run_dir)
    if not config.trains(recipe):
        message = f"got {run_dir}, which is an evaluation itself; expected a run that trains. Try model=PATH"
        raise RecipeError(Problem("run", "unsupported", message))
    return recipe


def evaluation_folder(run_dir: Path, suite: str, step: int) -> Path:
    """Return the run folder of the evaluation of one checkpoint."""
    return run_dir / FOLDER / suite / f"step_{step:06d}"


def select(run_dir: Path, suite: str, step: int | None) -> Checkpoint:
    """Return the complete checkpoint of a step; of the latest step if `step` is None. Raises RecipeError if there is none."""
    checkpoints = available(run_dir, suite)
    if not checkpoints:
        message = f"{run_dir} has no complete checkpoint yet. Try step=follow, which waits for them, or model=PATH"
        raise RecipeError(Problem("run", "no-checkpoint", message))
    if step is not None and step not in checkpoints:
        wrong_step = f"got {step}; expected the step of a complete checkpoint: {', '.join(map(str, checkpoints))}"
        raise RecipeError(Problem("step", "no-checkpoint", wrong_step))
    return checkpoints[max(checkpoints) if step is None else step]


def available(run_dir: Path, suite: str) -> dict[int, Checkpoint]:
    """Return step -> complete checkpoint, oldest first: the run's own checkpoints, and those kept for this suite."""
    waiting = (checkpoint.read(folder) for folder in waiting_checkpoints.folders(run_dir / FOLDER / suite))
    by_step = {point.step: point for point in waiting if point}
    by_step |= {point.step: point for point in checkpoint.complete_in(run_dir / "checkpoints")}
    return dict(sorted(by_step.items()))


def of_checkpoint(run_dir: Path, recipe: Recipe, saved: Checkpoint, suite: str) -> Source:
    """Return a run's checkpoint as a source. recipe: the run's recipe."""
    folder = evaluation_folder(run_dir, suite, saved.step)
    evaluated = {"checkpoint": str(waiting_checkpoints.checkpoint_folder(folder)), "step": saved.step}
    name = f"step {saved.step} of {run_dir}"
    return Source(_values(run_dir, recipe, evaluated), str(run_dir / "recipe.yaml"), folder, name, saved.folder)


def of_future(recipe: Recipe, suite: str) -> Source:
    """Return a source for the checkpoints that a run is still to write. Checks use it before the run is submitted."""
    run_dir = Path(recipe.run_dir).absolute()
    folder = evaluation_folder(run_dir, suite, 0)
    return Source(_values(run_dir, recipe, {}), "the recipe", folder, f"checkpoints of {run_dir}")


def _values(run_dir: Path, recipe: Recipe, evaluated: dict[str, Any]) -> dict[str, Any]:
    values = {"policy": _policy(recipe), "cluster": _cluster(recipe), "evaluate": {"run": str(run_dir), **evaluated}}
    values["checkpointing"] = _part(recipe.checkpointing, ("verify", "encryption"))
    return values | ({"module_folders": recipe.module_folders} if recipe.module_folders else {})


def _policy(recipe: Recipe) -> dict[str, Any]:
    policy = _part(recipe.policy, POLICY) | {"generation": _part(recipe.policy.generation, GENERATION)}
    if not generates(recipe):  # these are defaults there, and the suite may know better
        del policy["generation"]
    if recipe.policy.dtensor_cfg.lora_cfg.enabled:  # the checkpoint then holds adapters alone
        policy["dtensor_cfg"] = {"lora_cfg": asdict(recipe.policy.dtensor_cfg.lora_cfg)}
    if recipe.policy.megatron_cfg.peft.enabled:
        policy["megatron_cfg"] = {"peft": asdict(recipe.policy.megatron_cfg.peft)}
    return policy


def _cluster(recipe: Recipe) -> dict[str, Any]:
    component = recipe.cluster.generate if generates(recipe) else recipe.cluster.train
    return _part(recipe.cluster, CLUSTER) | {"generate": asdict(component)}


def _part(section: Any, names: Iterable[str]) -> dict[str, Any]:
    values = asdict(section)
    return {name: values[name] for name in names}
