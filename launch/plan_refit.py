"""Plan a recipe's refit and predict its time with `python launch/plan_refit.py recipe=NAME [key=value ...]`.

Needs only the model's config.json, or its description in recipes/models: no weights, GPU, job or torch. Prints what each rank
sends and receives, compares that with the network's lower bound and with a reference broadcast, and names the bottleneck.
Writes the timeline as an SVG. If a recipe under `needs` has yet to write the model, the plan uses the shape of that recipe's
initial model.

Exit status: 0; 2 if the command line, the recipe or the model has a problem.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # replaces launch/, so that no installed package is needed

import numpy as np

from launch.plan import backend_choice, refit_picture, refit_time
from launch.plan.estimate import needed_model
from launch.plan.rank_division import parallel_sizes
from launch.plan.refit import RefitPrediction, predict
from launch.preflight import architecture
from launch.recipes import reading
from launch.recipes.model_files import is_local, read_json
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
    refits_by_ipc,
    refuse,
    trains,
    uses_megatron,
)


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
    out: Annotated[Path | None, Key("PATH", "the timeline picture; default: NAME-refit.svg")] = None

    def problems(self) -> Iterator[Problem]:
        """Yield a problem for each path that does not exist or has another format."""
        if self.model_config and not self.model_config.is_file():
            yield Problem("model_config", "file-not-found", f"there is no file {self.model_config}")
        if self.out and not self.out.parent.is_dir():
            yield Problem("out", "file-not-found", f"there is no folder {self.out.parent}")
        if self.out and self.out.suffix != ".svg":
            yield Problem("out", "bad-format", f"got {self.out}; expected a file name that ends in .svg")


def main(arguments: list[str]) -> int:
    """Run the command, and return its exit status."""
    return command_line.run(__doc__, PlanRefitRequest, execute, arguments)


def execute(request: PlanRefitRequest) -> int:
    """Predict the refit, print the report, and write the picture. Raises RecipeError."""
    try:
        with model_folder(request.model_config) as folder:
            recipe, choice = load(request, folder)
            predicted = predict(recipe)
    except ValueError as error:  # of layouts that are unknown, or do not match
        raise error if isinstance(error, RecipeError) else RecipeError(Problem("", "unsupported", str(error))) from error
    out = request.out or Path(f"{Path(recipe.name).name}-refit.svg")  # a name may contain slashes
    print(report(predicted, choice))
    title = f"refit of {predicted.recipe.name}, {_seconds(predicted.seconds)} predicted"
    drawn = refit_picture.draw(predicted.simulation, ranks(predicted.recipe.cluster.train), title)
    out.write_text(drawn, encoding="utf-8")
    print(f"{'timeline':14s}{out}")
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
    if is_local(recipe.policy.model_name):
        refuse(architecture.problems(recipe))
    return recipe, choice


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
        f" {network.latency_us:g} us a message, copies at {network.memory_gb_per_s:g} GB/s",
    ]


def _table(predicted: RefitPrediction) -> list[str]:
    """Return the lines of a table with minimum, mean and maximum over the ranks of each component."""
    schedule, load, train = predicted.schedule, predicted.simulation.loads, ranks(predicted.recipe.cluster.train)
    out, staged = load.sent.sum(0), load.staging(refits_by_ipc(predicted.recipe))
    sends, receives = load.sends.sum(0), load.receives.sum(0)
    rows = [
        ("bytes out of a train rank", predicted.sent, _size),
        ("bytes into a generate rank", predicted.received, _size),
        ("  of these by NIC", load.nic_in.sum(0)[train:], _size),
        ("bytes passed on by a generate rank", out[train:], _size),
        ("messages from a train rank", sends[:train], _count),
        ("messages to a generate rank", receives[train:], _count),
        ("staging memory of a train rank", staged[:train], _size),
        ("staging memory of a generate rank", staged[train:], _size),
    ]
    members = sorted({len(group) for group in schedule.groups})
    sharing = f"none: the train ranks send all bytes separately to {_plural(len(schedule.engines), 'engine')}"
    if members[-1] > 1:
        sharing = (
            f"{_plural(len(schedule.engines), 'engine')} in {_plural(len(schedule.groups), 'group')} of"
            f" {' or '.join(map(str, members))}; the train ranks send a byte once to every group"
        )
    requested = predicted.recipe.policy.generation.refit_cfg.bucket_bytes
    return [
        f"{'':36s}{'min':>12s}{'mean':>12s}{'max':>12s}",
        *(f"{name:36s}{show(v.min()):>12s}{show(v.mean()):>12s}{show(v.max()):>12s}" for name, v, show in rows),
        f"{'rounds':14s}{schedule.rounds}; per round a rank sends at most {_size(schedule.bucket_bytes)} and receives at"
        f" most the same (bucket_bytes: {_size(requested)})",
        f"{'sharing':14s}{sharing}",
    ]


def _verdict(predicted: RefitPrediction) -> list[str]:
    network = predicted.recipe.cluster.network
    spent = sorted(refit_time.bounds(predicted.simulation).items(), key=lambda item: -item[1])
    seconds, floor = predicted.seconds, predicted.floor
    broadcast, stage = refit_time.broadcast_seconds(predicted.reference, network)
    parts = ", ".join(f"{name} {_seconds(value)} ({value / seconds:.0%})" for name, value in spent if value > seconds / 200)
    load = predicted.simulation.loads
    nic = np.maximum(load.nic_out.sum(0), load.nic_in.sum(0))
    busiest = float(nic.max()) / (refit_time.GIGA * network.nic_gb_per_s)
    longer = f"{broadcast / seconds:.1f} times as long"
    return [
        f"{'floor':14s}{_seconds(floor[0])}, set by {floor[1]}",
        f"{'busiest NIC':14s}{_seconds(busiest)} if never idle, on rank {int(nic.argmax())}",
        f"{'predicted':14s}{_seconds(seconds)}, {floor[0] / seconds:.0%} of the floor's rate; bound by {spent[0][0]}: {parts}",
        f"{'broadcast':14s}{_seconds(broadcast)} for the reference, bound by its {stage}: {longer}",
    ]


def _count(count: float) -> str:
    return f"{count:.0f}" if count == int(count) else f"{count:.1f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
