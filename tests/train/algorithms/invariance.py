"""Run the same steps of an algorithm on the same samples, in any layout and microbatches, with the train role's own code.

`python -m tests.train.algorithms` prints the largest differences between layouts and microbatches.

`python -m tests.train.algorithms` prints how far layouts and microbatches are apart at most.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file

from pipeline import algorithms, coordinator
from pipeline.config import generates
from pipeline.roles.train import TrainRole
from pipeline.train.host_messages import all_gather_bytes
from pipeline.types import DataParallelRank, Moments, Update
from tests.train import ranks
from tests.train.algorithms import cases
from tests.train.megatron import layouts
from tests.train.megatron.layouts import CP2, DP2, EP2, ONE, PP2, TP2, TP2_SP, Layout

SEED = 7


@dataclass(frozen=True)
class Setup:
    """A layout and a split into microbatches for the same steps."""

    backend: str  # fsdp, megatron
    layout: Layout
    batching: str = "packed"  # packed: microbatches of some sequences; single: of one, or one pair; reversed: back to front
    family: str = "llama"

    @property
    def name(self) -> str:
        batching = "" if self.batching == "packed" else f" {self.batching}"
        family = "" if self.family == "llama" else f" {self.family}"
        return f"{self.backend} {self.layout.name}{batching}{family}"

    def changes(self) -> dict[str, Any]:
        """Return the keys of a recipe for it."""
        packing = {"enabled": self.batching != "single", "train_mb_tokens": 48, "logprob_mb_tokens": 80}
        policy: dict[str, Any] = {"sequence_packing": packing, "train_micro_batch_size": 1, "logprob_batch_size": 3}
        if self.backend == "fsdp":
            return {"policy": {**policy, "dtensor_cfg": {"tensor_parallel_size": self.layout.tp}}}
        first = 2 if self.layout.pp > 1 and self.family in layouts.UNEVEN else None
        return {"policy": {**policy, "megatron_cfg": self.layout.megatron(num_layers_in_first_pipeline_stage=first)}}


@dataclass(frozen=True)
class Result:
    """The results of the steps of a case."""

    metrics: list[dict[str, float]]  # of each optimizer step of each model
    weights: dict[str, dict[str, torch.Tensor]]  # of every model that learns, after the last step

    def difference(self, reference: Result, initial: dict[str, torch.Tensor]) -> Difference:
        assert self.weights.keys() == reference.weights.keys()
        pairs = list(zip(self.metrics, reference.metrics, strict=True))
        changes = reference.changes(initial)
        return Difference(
            # A loss may be the difference of sums that cancel: it is judged by the largest one of the case.
            max(abs(a["loss"] - b["loss"]) for a, b in pairs) / max(abs(b["loss"]) for _, b in pairs),
            max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs),
            max(largest(self.weights[model], theirs) / changes[model] for model, theirs in reference.weights.items()),
        )

    def changes(self, initial: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return the largest change of any weight, by model.

        A value head is left out: its initial weights are not `initial`.
        """
        return {
            model: largest(tensors, {name: initial[name] for name in tensors if name in initial})
            for model, tensors in self.weights.items()
        }


def largest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest differences of `theirs` from ours."""
    return max((ours[name] - tensor).abs().max().item() for name, tensor in theirs.items())


@dataclass(frozen=True)
class Difference:
    """The largest relative differences: to the largest loss; to the norm; to the largest change of any weight of that model."""

    loss: float
    norm: float
    weights: float


# ---- the steps ----------------------------------------------------------------------------------------------------------


class AllRanks:
    """The train realm's `RpcGroup` for a coordinator on every rank: a call is this rank's own."""

    def __init__(self, role: TrainRole, reverse: bool):
        self.role = role
        self._reverse = reverse
        self.steps: list[dict[str, list[dict[str, float]]]] = []  # what each `step` gave

    def scatter(self, verb: Callable[[TrainRole, list[Update]], None], parts: list[list[Update]]) -> Done:
        updates = parts[dist.get_rank()]
        if self._reverse:
            together = self.role._algorithm.sequences_per_item
            updates = [replace(update, train=[backward(m, together) for m in reversed(update.train)]) for update in updates]
        reply = verb(self.role, updates)
        return Done(gathered(reply, float) if verb is TrainRole.measure_kl else reply)

    def call(self, verb: Callable[..., Any], *argument: Any) -> Done:
        reply = verb(self.role, *argument)
        if verb is TrainRole.step:
            self.steps.append(reply)
        return Done(gathered(reply, list[Moments]) if verb is TrainRole.estimate else [reply])


def backward(members: list[int], together: int) -> list[int]:
    """Yield the samples in reverse order, except within a pair."""
    return [i for start in range(len(members) - together, -1, -together) for i in members[start : start + together]]


@dataclass(frozen=True)
class Done:
    reply: Any

    def result(self) -> Any:
        return self.reply


def gathered(value: Any, kind: Any) -> list:
    """Return every rank's results."""
    messages = all_gather_bytes(dist.group.WORLD, msgspec.msgpack.encode(value))
    return [msgspec.msgpack.decode(message, type=kind) for message in messages]


def learn(case: str, setup: Setup, folder: Path) -> tuple[TrainRole, list[dict[str, list[dict[str, float]]]]]:
    """Return the role after all steps of a case, and the metrics of each step."""
    if parallel_state.model_parallel_is_initialized():  # of the setup before
        parallel_state.destroy_model_parallel()
    recipe = cases.recipe(case, folder / setup.family, folder / "qwen3", setup.changes())
    algorithm = algorithms.build(recipe)
    world = SimpleNamespace(own=dist.group.WORLD, rank=dist.get_rank(), phase=lambda name: contextlib.nullcontext())
    role = TrainRole(recipe, SEED, world, algorithm, refit=None)
    train = AllRanks(role, reverse=setup.batching == "reversed")
    places = gathered(role.setup(), DataParallelRank)
    if algorithm.needs.own_top_k:
        role.match_tokens(cases.matched(recipe))
    run = SimpleNamespace(recipe=recipe, train=train, data_ranks=places, logger=SimpleNamespace(note_learning=lambda *_: None))
    for number in range(cases.STEPS if generates(recipe) else cases.STEPS * cases.UPDATES):
        samples = cases.samples(recipe, algorithm, number)
        coordinator.learn(run, algorithm, samples, algorithm.trains(number) if generates(recipe) else ["policy"])
    return role, train.steps


def measure(names: Sequence[str], setup: Setup, layout: Layout, folder: Path) -> None:
    """Write each case's results on every rank."""
    for case in names:
        role, steps = learn(case, setup, folder)
        found = {model: {n: t.clone() for n, t in role._models[model].weights()} for model in role._algorithm.losses}
        of_steps = [metrics for step in steps for of_model in step.values() for metrics in of_model]
        if dist.get_rank() == 0:
            path = folder / "results" / setup.name / case
            path.mkdir(parents=True, exist_ok=True)
            for model, tensors in found.items():
                save_file(tensors, path / f"{model}.safetensors")
            (path / "steps.json").write_text(json.dumps(of_steps))


# ---- the table ----------------------------------------------------------------------------------------------------------

ONE_RANK = Setup("fsdp", ONE)
BATCHINGS = (Setup("fsdp", ONE, "single"), Setup("fsdp", ONE, "reversed"), Setup("megatron", ONE, "single"))
FSDP = (Setup("fsdp", DP2, "single"), Setup("fsdp", TP2))
MEGATRON = tuple(Setup("megatron", layout) for layout in (DP2, TP2, TP2_SP, CP2, PP2))
FOUR_RANKS = tuple(Setup("megatron", Layout(**sizes)) for sizes in ({"tp": 2, "cp": 2, "sp": True}, {"pp": 2, "dp": 2}))
OF_LLAMA = (*BATCHINGS, *FSDP, *MEGATRON)
OF_EXPERTS = tuple(Setup("megatron", layout, family="qwen3_moe") for layout in (EP2, TP2_SP, CP2, PP2))
# A model with experts: where a layout treats those otherwise, it does so whatever the loss.
WITH_EXPERTS = ("sft", "grpo, entropy bonus")


def result(setup: Setup, case: str, folder: Path) -> Result:
    path = folder / "results" / setup.name / case
    weights = {file.stem: load_file(file) for file in path.glob("*.safetensors")}
    return Result(json.loads((path / "steps.json").read_text()), weights)


def differences(setups: Sequence[Setup], names: Sequence[str], folder: Path) -> dict[str, dict[str, Difference]]:
    """Return {case: {setup: difference from one rank of FSDP2}}. The setups are of one family."""
    for setup in [replace(ONE_RANK, family=setups[0].family), *setups]:
        measured(setup, names, folder)
    return {case: {setup.name: difference(setup, case, folder) for setup in setups} for case in names}


def measured(setup: Setup, names: Sequence[str], folder: Path) -> None:
    """Run these cases and save each result."""
    ranks.run(functools.partial(measure, names, setup), Layout(dp=setup.layout.ranks), folder)


def difference(setup: Setup, case: str, folder: Path) -> Difference:
    """Compare the results of a setup and of one rank of FSDP2, both of which were measured."""
    reference = result(replace(ONE_RANK, family=setup.family), case, folder)
    return result(setup, case, folder).difference(reference, initial(setup.family, folder))


def initial(family: str, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / family / "model.safetensors")
