"""Which backend trains: what the recipe asks for, or else a choice by the model's size, the GPUs and their memory.

Decided once, at submission, and written into the run's recipe, so that every rank reads the same.

The rule, where the recipe leaves it open; the first line that applies:
    the run folder exists                           as the run began
    keys of one backend's layout are set            that backend
    no GPUs; the model is not there yet; a family that the Megatron backend does not have   FSDP2
    many experts, and each GPU can hold the model   Megatron-Core: FSDP2 would gather all experts of a layer for every batch
    the model fits under FSDP2                      FSDP2
    otherwise                                       Megatron-Core; if its layout's keys must cut the model first, that is said

"Fits" is what parameters, gradients and optimizer state take, against 70 % of the GPUs' memory; activations and logits are
not counted, they have the rest. PPO's critic is a second trained model; a teacher or a reward model on the train ranks has its
weights alone, and with cpu_offload it has them on the GPUs only while it computes; the reference stays in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.model_files import described
from launch.model_shape import ModelShape
from launch.units import plural
from pipeline import config
from pipeline.config import (
    MEGATRON_MODEL_TYPES,
    PRECISIONS,
    Backend,
    DTensorConfig,
    MegatronConfig,
    Problem,
    Recipe,
    RecipeError,
    asked_backend,
    hardware,
    ranks,
)

NAMES: dict[Backend, str] = {"megatron": "Megatron-Core", "dtensor": "FSDP2"}
MANY_EXPERTS = 16  # Mixtral's 8 are few: a token passes 2 of them, and gathering all costs four times what it uses
FILLED = 0.7  # of the memory
STATE_BYTES = 16  # FSDP2's for each trained parameter: itself, its gradient and Adam's two moments in float32

MEGATRON_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
)
DTENSOR_LAYOUT = ("tensor_parallel_size", "cpu_offload", "lora_cfg")


@dataclass(frozen=True, slots=True)
class Choice:
    backend: Backend
    reason: str
    warning: str | None = None

    def __str__(self) -> str:
        return f"{NAMES[self.backend]} trains, because {self.reason}"


def choose(recipe: Recipe, pending: list[Path] = (), before: Recipe | None = None) -> tuple[Recipe, Choice]:
    """Return the recipe with both `enabled` keys set and everything checked that depends on them, and why.

    pending: run folders of needed recipes that have not run yet. before: the recipe that the run began with, if it has begun.
    Raises RecipeError.
    """
    choice = _asked_for(recipe) or _as_before(before) or _by_keys(recipe) or _by_size(recipe, pending)
    recipe = config.decided(recipe, choice.backend)
    config.validate(recipe)
    return recipe, choice


def _asked_for(recipe: Recipe) -> Choice | None:
    backend = asked_backend(recipe.policy)
    if backend is None:
        return None
    given = {"megatron": recipe.policy.megatron_cfg.enabled, "dtensor": recipe.policy.dtensor_cfg.enabled}
    if all(given.values()):
        both = "policy.megatron_cfg.enabled and policy.dtensor_cfg.enabled are both true; one of them is enough"
        return Choice(backend, "policy.megatron_cfg.enabled goes before policy.dtensor_cfg.enabled", both)
    if given[backend]:
        return Choice(backend, f"policy.{backend}_cfg.enabled is true")
    other = next(name for name in given if name != backend)
    return Choice(backend, f"policy.{other}_cfg.enabled is false")


def _as_before(before: Recipe | None) -> Choice | None:
    backend = asked_backend(before.policy) if before else None
    return Choice(backend, "the run began with it") if backend else None


def _by_keys(recipe: Recipe) -> Choice | None:
    policy = recipe.policy
    megatron = _changed("megatron", policy.megatron_cfg, MegatronConfig(), MEGATRON_LAYOUT)
    dtensor = _changed("dtensor", policy.dtensor_cfg, DTensorConfig(), DTENSOR_LAYOUT)
    if megatron and dtensor:
        told = (
            f"got a layout of Megatron-Core, and {dtensor} of FSDP2; expected one backend. Try policy.megatron_cfg.enabled=true"
            " or policy.dtensor_cfg.enabled=true"
        )
        raise RecipeError(Problem(megatron, "ambiguous", told))
    if megatron or dtensor:
        return Choice("megatron" if megatron else "dtensor", f"{megatron or dtensor} is set")
    return None


def _changed(backend: Backend, section: Any, defaults: Any, names: tuple[str, ...]) -> str | None:
    """Return the first of the keys that is not at its default."""
    return next((f"policy.{backend}_cfg.{n}" for n in names if getattr(section, n) != getattr(defaults, n)), None)


# ---- by size ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """A model that the train ranks hold."""

    shape: ModelShape
    precision: str
    trained: bool = True
    offloaded: bool = False  # a frozen model's weights are in host memory while it does not compute

    @property
    def weights(self) -> int:
        return PRECISIONS[self.precision] * self.shape.parameters


def fsdp_bytes(held: list[Held], count: int) -> float:
    """Return the bytes on each of `count` GPUs: the state of all models, cut, and the layers in use of one at a time.

    A layer in use is whole, in the compute precision, with the next one on its way; so is its gradient, before it is scattered.
    """

    def state(m: Held) -> int:
        return STATE_BYTES * m.shape.parameters if m.trained else 0 if m.offloaded else m.weights

    return sum(state(m) / count for m in held) + max(3 * PRECISIONS[m.precision] * m.shape.largest_layer for m in held)


def megatron_bytes(held: list[Held], count: int, cut: int) -> float:
    """Return the bytes on each of `count` GPUs: parameters and gradients cut over `cut` of them, optimizer state over all.

    Bytes per parameter from Megatron-Core's guide to the distributed optimizer, d GPUs sharing the state: 6 + 12/d with
    bfloat16 parameters and float32 gradients, 8 + 8/d with float32 parameters. Frozen weights come to the GPUs whole, so for a
    while they lie beside the others.
    """
    sharing = count / cut

    def state(m: Held) -> float:
        each = 6 + 12 / sharing if m.precision == "bfloat16" else 8 + 8 / sharing
        return m.shape.parameters / cut * each if m.trained else m.weights / cut

    return sum(map(state, held))


def _by_size(recipe: Recipe, pending: list[Path]) -> Choice:
    train = recipe.cluster.train
    if not train.gpus_per_node:
        return Choice("dtensor", "cluster.train has no GPUs")
    model = described(recipe.policy, pending)
    if model is None:
        return Choice("dtensor", f"{recipe.policy.model_name} is not there yet, so its size is not known")
    held = []
    for section, policy in config.models(recipe).items():
        its = described(policy, pending, f"{section}.model_name") or model  # what a run has yet to leave: as the policy
        if (family := its.get("model_type")) not in MEGATRON_MODEL_TYPES:
            return Choice("dtensor", f"the Megatron backend has no '{family}' models")
        if not (section.startswith("env.") and config.serves_rewards(recipe)):  # that one has ranks of its own
            held.append(Held(ModelShape.of(its), policy.precision, *_kind(recipe, section)))
    count, memory_gb = ranks(train), hardware.memory_gb(train)
    room, fsdp, megatron = FILLED * memory_gb * 1e9, fsdp_bytes(held, count), megatron_bytes(held, count, 1)
    what, gpus = _described(held), f"GB on each of {count} GPUs with {memory_gb:g}"
    if held[0].shape.experts >= MANY_EXPERTS and megatron <= room:
        return Choice("megatron", f"{what} take {megatron / 1e9:.1f} {gpus}, and are not gathered layer by layer")
    if fsdp <= room:
        return Choice("dtensor", f"{what} take {fsdp / 1e9:.1f} {gpus}")
    reason = f"under FSDP2 {what} would take {fsdp / 1e9:.1f} {gpus}"
    if megatron <= room:
        return Choice("megatron", reason)
    cuts = [cut for cut in range(2, count + 1) if count % cut == 0 and megatron_bytes(held, count, cut) <= room]
    if not cuts:
        told = (
            f"{reason}; under Megatron-Core too they do not fit into {FILLED:.0%} of that, however they are cut. Try more GPUs,"
            " or policy.megatron_cfg.enabled=true or policy.dtensor_cfg.enabled=true"
        )
        raise RecipeError(Problem("cluster.train", "out-of-memory", told))
    told = (
        f"{reason}; Megatron-Core fits if it cuts the model over at least {cuts[0]} GPUs. Try tensor_model_parallel_size,"
        " pipeline_model_parallel_size or expert_model_parallel_size"
    )
    raise RecipeError(Problem("policy.megatron_cfg", "out-of-memory", told))


def _described(held: list[Held]) -> str:
    shape, others = held[0].shape, len(held) - 1
    experts = f" ({shape.routed / 1e9:.1f}e9 in {shape.experts} experts a layer)" if shape.experts else ""
    more = f" and {plural(others, 'more model')}" if others else ""
    return f"{shape.parameters / 1e9:.1f}e9 parameters{experts}{more}"


def _kind(recipe: Recipe, section: str) -> tuple[bool, bool]:
    """Return whether the model that a section describes is trained, and whether it is offloaded."""
    if section in ("policy", "value"):
        return True, False
    return False, recipe.teacher.cpu_offload if section == "teacher" else config.reward_model(recipe).cpu_offload
