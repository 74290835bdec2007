"""Learning rates of NeMo-RL's recipes, theirs and ours.

Theirs are in golden/schedules.json, made by their code (`peer_schedules.py`). Ours come from an import of the recipe: its keys
are translated, a backend is built with the optimizer and the schedule that result, and the rate is read from its optimizer. The
recipe is a small one with the inputs that the golden file lists.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml

from launch.recipes import reading
from pipeline import config
from pipeline.config import PolicyConfig, Recipe, uses_megatron
from pipeline.train.fsdp import FSDPBackend
from pipeline.train.train_backend import ModelRole, TrainBackend
from tests.train import cases
from tests.train.megatron import layouts

GOLDEN = Path(__file__).parent / "golden" / "schedules.json"
THEIR_SHAPE = Path(__file__).parents[1] / "nemo_rl" / "recipes"


@dataclass(frozen=True)
class Case:
    recipe: str  # path in NeMo-RL's repository
    changes: tuple[str, ...]
    model: str  # policy, value
    backend: str  # dtensor, megatron
    calls: int  # of train() in a step
    updates: int  # in a call of train()
    inputs: dict[str, Any]
    lr: tuple[float, ...]  # of each call of train()

    @property
    def name(self) -> str:
        pairs = [change.split("=") for change in self.changes if "_cfg.enabled" not in change]
        changed = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in pairs)
        return f"{Path(self.recipe).stem} {self.model} {self.backend}{f' ({changed})' if changed else ''}"

    @property
    def tolerance(self) -> float:
        """Return the tolerance as a share of the highest rate: rounding only, with two exceptions."""
        if self.model == "value":  # torch's LinearLR multiplies its rate from step to step, and cannot begin at 0
            return 1e-12
        if any(change.endswith("lr_decay_iters=9") for change in self.changes):
            # A warm-up that the decay cuts ends one sample before it there, and with it here.
            return 1 / (9 * self.inputs[self.model]["train_global_batch_size"])
        return 0.0


def golden() -> list[Case]:
    found = json.loads(GOLDEN.read_text())["cases"]
    return [
        Case(
            *(case["recipe"], tuple(case["changes"]), case["model"], case["backend"]),
            *(case["train_calls_per_step"], case["updates_per_train_call"], case["inputs"], tuple(case["lr"])),
        )
        for case in found
    ]


# ---- ours ---------------------------------------------------------------------------------------------------------------


def imported(case: Case, folder: Path) -> Recipe:
    """Return their recipe in our keys: a small one in its shape with the same inputs, written to `folder`."""
    path = folder / "theirs.yaml"
    path.write_text(yaml.safe_dump(_in_their_shape(case)))
    loaded = reading.inspect(str(path))
    if loaded.problems:
        raise ValueError(f"{case.name}: {loaded.problems}")
    return loaded.recipe


def _in_their_shape(case: Case) -> dict[str, Any]:
    algorithm = next(name for name in case.inputs if name in config.ONLINE)
    base = algorithm if algorithm == "ppo" else "grpo_megatron" if case.backend == "megatron" else "grpo"
    prompt = {"default": {"prompt_file": str(THEIR_SHAPE / "examples/prompts/boxed.txt")}}
    layer = {"defaults": str(THEIR_SHAPE / f"{base}.yaml"), "data": prompt, **case.inputs}
    size = case.inputs[case.model]["train_global_batch_size"]
    for model in ("policy", "value") if algorithm == "ppo" else ("policy",):
        layer[model] = {**layer.get(model, {}), "train_global_batch_size": size}
    return layer


def built(recipe: Recipe, model: str) -> TrainBackend:
    """Build a tiny model with the recipe's optimizer and schedule, in the train realm of this process."""
    policy: PolicyConfig = recipe.policy if model == "policy" else config.critic(recipe)
    role = ModelRole("values" if model == "value" else "logprobs")
    settings = {"optimizer": policy.optimizer, "scheduler": policy.scheduler}
    tiny = cases.policy(config.RECIPES / "tiny", random_init=True, **settings)
    if not uses_megatron(recipe.policy):
        return FSDPBackend(tiny, dist.group.WORLD, 7, role)
    own = policy.megatron_cfg
    return layouts.backend(tiny, role=role, optimizer=own.optimizer, scheduler=own.scheduler)


def rates(backend: TrainBackend, calls: int, advances: int = 1) -> list[float]:
    """Return the optimizer's rate in each of this many calls of train(), if each advances the schedule `advances` times."""
    found = []
    backend.step([cases.pack([1])], cases.value_loss if backend._role.head == "values" else cases.loss)
    for _ in range(calls):
        found.append(_groups(backend)[0]["lr"])
        for _ in range(advances):
            backend.advance_schedule()
    return found


def _groups(backend: TrainBackend) -> list[dict[str, Any]]:
    """Return the parameter groups of the optimizer that makes the updates."""
    return (backend._optimizer if isinstance(backend, FSDPBackend) else backend._optimizer._core).param_groups
