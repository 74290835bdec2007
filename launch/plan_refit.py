"""Plan a recipe's refit and predict its time with `python launch/plan_refit.py recipe=NAME [key=value ...]`.

Needs the model's config.json, or its description in recipes/models, and the packages of a run, which describe what each rank
holds or receives: no weights, GPU or job. A model of 70 billion parameters takes about half a minute, one with thousands of
experts on many ranks takes minutes. Prints what each rank sends and receives, compares its time with that of a reference
broadcast, and names the bottleneck. If a recipe under `needs` has yet to write the model, the plan uses the shape of that
recipe's initial model.

Exit status: 0; 2 if the command line, the recipe or the model has a problem.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # backends describe their layouts alike without GPUs
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np

from launch.plan import backend_choice, refit_time
from launch.plan.estimate import needed_model
from launch.plan.rank_division import parallel_sizes
from launch.plan.refit import broadcast_seconds, node_names
from launch.preflight import architecture
from launch.recipes import reading
from launch.recipes.model_files import is_local, planning_config, read_json
from launch.terminal import command_line
from launch.terminal.command_line import Key
from launch.terminal.units import plural as _plural
from launch.terminal.units import seconds as _seconds
from launch.terminal.units import size as _size
from pipeline.config import (
    PRECISIONS,
    Problem,
    Recipe,
    RecipeError,
    engine_ranks,
    generates,
    ranks,
    ranks_per_node,
    refuse,
    trains,
    uses_megatron,
)
from pipeline.config.cluster import COPIES_GB_PER_S, LATENCY_US
from pipeline.models.shape import ModelShape
from pipeline.refit import plan
from pipeline.refit.schedule import RefitSchedule

CAUSE = 400  # characters of a package's error in the message

if TYPE_CHECKING:
    from pipeline.refit.recorded_sides import RecordedSides


@dataclass(frozen=True)
class PlanRefitRequest:
    """The command line."""

    recipe: Annotated[str, Key("NAME", "a file in recipes/, without .yaml, or a path to one")]
    overrides: Annotated[
        list[str], Key("key=value", "any key of the recipe; the network is cluster.network.*", others=True)
    ] = field(default_factory=list)
    model_config: Annotated[
        Path | None,
        Key("PATH", "a Hugging Face config.json to plan for instead of policy.model_name; no other file is needed"),
    ] = None

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if the path of the model's config.json does not exist."""
        if self.model_config and not self.model_config.is_file():
            yield Problem("model_config", "file-not-found", f"there is no file {self.model_config}")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, PlanRefitRequest, execute, arguments)


def execute(request: PlanRefitRequest) -> int:
    """Predict the refit, and print the report. Raises RecipeError."""
    try:
        with model_folder(request.model_config) as folder:
            recipe, choice = load(request, folder)
            predicted = predict(recipe)
    except ValueError as error:  # of layouts that are unknown, or do not match
        raise error if isinstance(error, RecipeError) else RecipeError(Problem("", "unsupported", str(error))) from error
    print(report(predicted, choice))
    return 0


# ---- the recipe ---------------------------------------------------------------------------------------------------------


@contextmanager
def model_folder(model_config: Path | None) -> Iterator[Path | None]:
    """Yield a temporary folder that holds the file as config.json, the name that transformers and vLLM expect.

    Yield None without a file.
    """
    if model_config is None:
        yield None
        return
    model = read_json(model_config)
    if not isinstance(model, dict) or "model_type" not in model:
        message = f"got {model_config}; expected a model's config.json, with a model_type"
        raise RecipeError(Problem("model_config", "bad-format", message))
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        shutil.copyfile(model_config, Path(folder) / "config.json")
        yield Path(folder)


def load(request: PlanRefitRequest, folder: Path | None) -> tuple[Recipe, backend_choice.BackendChoice]:
    """Return (the recipe as `launch/submit.py` reads it, without the model's weights; its backend). Raises RecipeError."""
    overrides = [*request.overrides, "policy.random_init=true"]
    if folder:
        overrides.append(f"policy.model_name={folder}")
    recipe = reading.load(request.recipe, overrides)
    if not generates(recipe) or not trains(recipe):
        message = f"got {recipe.algorithm}, which makes no refits; expected an online algorithm such as grpo"
        raise RecipeError(Problem("algorithm", "unsupported", message))
    if not folder and (model := needed_model(recipe)):
        recipe = reading.load(request.recipe, [*overrides, f"policy.model_name={model}"])
    recipe, choice = backend_choice.choose(recipe)
    assert choice is not None, "it trains"
    refuse((architecture.problems if is_local(recipe.policy.model_name) else architecture.against_layout)(recipe))
    return recipe, choice


# ---- the transfer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RefitPrediction:
    """The schedule of a refit, as a run lays it out, and its price."""

    recipe: Recipe
    parameters: int  # parameters of the model; a refit transfers its buffers too
    total: int  # bytes of all tensors that it transfers, each once
    nodes: np.ndarray  # [ranks], the number of each rank's node
    schedule: RefitSchedule
    price: refit_time.RefitPrice


def recorded(recipe: Recipe, model: Mapping[str, Any]) -> RecordedSides:
    """Return what each rank of a recipe holds or receives. model: the policy's config.json.

    Raises RecipeError, which names the rank, where a package is missing and for a model or a layout that a package refuses.
    """
    recorded_part = "the model"

    def progress(text: str) -> None:
        nonlocal recorded_part
        recorded_part = text
        print(f"recording {text}", file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="model-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages about optional parts, which describe no layout
        (Path(folder) / "config.json").write_text(json.dumps(model))
        try:
            from pipeline.refit.recorded_sides import record_sides  # torch and transformers; reading a recipe needs neither

            described = replace(recipe, policy=replace(recipe.policy, model_name=folder))
            return record_sides(described, progress)
        except RecipeError:
            raise
        except ImportError as error:
            message = f"{error}; the packages of a run describe its layouts. Try `make setup`, or run it in an image of the run"
            raise RecipeError(Problem("", "not-installed", message)) from error
        except Exception as error:  # the packages raise any class for a config.json or a layout that they cannot build
            cause = " ".join(f"{type(error).__name__}: {error}".split())[:CAUSE]
            message = (
                f"got {recipe.policy.model_name}, of which {recorded_part} cannot be recorded ({cause}); expected a model and a"
                " layout that this package builds. Try to compare the keys of config.json with those of the published model"
            )
            raise RecipeError(Problem("policy.model_name", "unsupported", message)) from error


def predict(recipe: Recipe) -> RefitPrediction:
    """Return the refit of a recipe whose train backend is chosen. Raises as `recorded`, and if layouts do not match."""
    model = planning_config(recipe.policy)
    assert model is not None  # None only for a model that a needed run has not written yet
    sides = recorded(recipe, model)
    itemsize, names = PRECISIONS[recipe.policy.precision], node_names(recipe)
    bucket, network = recipe.policy.generation.refit_cfg.bucket_bytes, recipe.cluster.network
    schedule = plan.schedule(sides.train, sides.generate, sides.engines, sides.shapes, itemsize, bucket, names, network)
    number = {name: i for i, name in enumerate(dict.fromkeys(names.values()))}
    nodes = np.array([number[names[rank]] for rank in range(len(names))])
    price = refit_time.price(refit_time.loads(refit_time.messages(schedule), nodes), network)
    total = itemsize * sum(map(math.prod, sides.shapes.values()))
    return RefitPrediction(recipe, ModelShape.of(model).parameters, total, nodes, schedule, price)


# ---- the report ---------------------------------------------------------------------------------------------------------


def report(predicted: RefitPrediction, choice: backend_choice.BackendChoice) -> str:
    """Return the text of a prediction: the setup, a table of what ranks move, and the verdict."""
    parts = (_headline(predicted, choice), _table(predicted), _verdict(predicted))
    return "\n\n".join("\n".join(lines) for lines in parts)


def _headline(predicted: RefitPrediction, choice: backend_choice.BackendChoice) -> list[str]:
    recipe, parameters = predicted.recipe, predicted.parameters
    cluster, policy, network = recipe.cluster, recipe.policy, recipe.cluster.network
    vllm, megatron, dtensor = policy.generation.vllm_cfg, policy.megatron_cfg, policy.dtensor_cfg
    engine = engine_ranks(vllm)
    trains = parallel_sizes(megatron if uses_megatron(policy) else dtensor)
    return [
        f"{recipe.name}: {parameters:,} parameters, {_size(parameters * PRECISIONS[policy.precision])} in {policy.precision}",
        f"{'train':14s}{ranks(cluster.train)} ranks, {ranks_per_node(cluster.train)} a node, {trains}; {choice}",
        f"{'generate':14s}{ranks(cluster.generate)} ranks, {ranks_per_node(cluster.generate)} a node, {parallel_sizes(vllm)};"
        f" {_plural(ranks(cluster.generate) // engine, 'engine')} of {_plural(engine, 'rank')}",
        f"{'network':14s}{network.nic_gb_per_s:g} GB/s a NIC, {network.node_gb_per_s:g} GB/s within a node,"
        f" {LATENCY_US:g} us a message, copies at {COPIES_GB_PER_S:g} GB/s",
    ]


def _table(predicted: RefitPrediction) -> list[str]:
    """Return the lines of a table with minimum, mean and maximum over the ranks of each component."""
    schedule, load, train = predicted.schedule, predicted.price.loads, ranks(predicted.recipe.cluster.train)
    rows = [
        ("bytes out of a train rank", load.sent[:train]),
        ("bytes into a generate rank", load.received[train:]),
        ("  of these by NIC", load.nic_in[train:]),
        ("bytes passed on by a generate rank", load.sent[train:]),
    ]
    members = sorted({len(group) for group in schedule.groups})
    sharing = f"none: the train ranks send all bytes separately to {_plural(len(schedule.engines), 'engine')}"
    if members[-1] > 1:
        sharing = (
            f"{_plural(len(schedule.engines), 'engine')} in {_plural(len(schedule.groups), 'group')} of"
            f" {' or '.join(map(str, members))}; the train ranks send a byte once to every group"
        )
    return [
        f"{'':36s}{'min':>12s}{'mean':>12s}{'max':>12s}",
        *(f"{name:36s}{_size(v.min()):>12s}{_size(v.mean()):>12s}{_size(v.max()):>12s}" for name, v in rows),
        f"{'rounds':14s}{schedule.rounds}; a rank sends at most {_size(schedule.bucket_bytes)} in a round",
        f"{'sharing':14s}{sharing}",
    ]


def _verdict(predicted: RefitPrediction) -> list[str]:
    network, price = predicted.recipe.cluster.network, predicted.price
    bucket = predicted.recipe.policy.generation.refit_cfg.bucket_bytes
    broadcast = broadcast_seconds(predicted.total, bucket, len(np.unique(predicted.nodes)), network)
    return [
        f"{'predicted':14s}{_seconds(price.seconds)}, bound by {price.limit}",
        f"{'broadcast':14s}{_seconds(broadcast)} for the reference: {broadcast / price.seconds:.1f} times as long",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
