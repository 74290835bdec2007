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
from pipeline import config
from pipeline.config import (
    MEGATRON_MODEL_TYPES,
    PRECISIONS,
    Backend,
    DTensorConfig,
    MegatronConfig,
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
    """The recipe with both `enabled` keys set and everything checked that depends on them, and why. Raises RecipeError.

    pending: run folders of needed recipes that have not run yet. before: the recipe that the run began with, if it has begun.
    """
    choice = _asked_for(recipe) or _as_before(before) or _by_keys(recipe) or _by_size(recipe, pending)
    recipe = config.decided(recipe, choice.backend)
    config.validate(recipe)
    return recipe, choice


def _asked_for(recipe: Recipe) -> Choice | None:
    backend = asked_backend(recipe.policy)
    if backend is None:
        return None
    megatron, dtensor = recipe.policy.megatron_cfg.enabled, recipe.policy.dtensor_cfg.enabled
    if megatron and dtensor:
        both = "policy.megatron_cfg.enabled and policy.dtensor_cfg.enabled are both true; one of them is enough"
        return Choice(backend, "policy.megatron_cfg.enabled goes before policy.dtensor_cfg.enabled", both)
    asked, other = ("megatron", "dtensor") if backend == "megatron" else ("dtensor", "megatron")
    if {"megatron": megatron, "dtensor": dtensor}[asked]:
        return Choice(backend, f"policy.{asked}_cfg.enabled is true")
    return Choice(backend, f"policy.{other}_cfg.enabled is false")


def _as_before(before: Recipe | None) -> Choice | None:
    backend = asked_backend(before.policy) if before else None
    return Choice(backend, "the run began with it") if backend else None


def _by_keys(recipe: Recipe) -> Choice | None:
    policy = recipe.policy
    megatron = _changed("megatron", policy.megatron_cfg, MegatronConfig(), MEGATRON_LAYOUT)
    dtensor = _changed("dtensor", policy.dtensor_cfg, DTensorConfig(), DTENSOR_LAYOUT)
    if megatron and dtensor:
        raise RecipeError(
            f"{megatron} and {dtensor} are of two backends; say which one trains with policy.megatron_cfg.enabled=true or"
            " policy.dtensor_cfg.enabled=true"
        )
    if megatron or dtensor:
        return Choice("megatron" if megatron else "dtensor", f"{megatron or dtensor} is set")
    return None


def _changed(backend: Backend, section: Any, defaults: Any, names: tuple[str, ...]) -> str | None:
    """The first of the keys that is not at its default."""
    return next((f"policy.{backend}_cfg.{n}" for n in names if getattr(section, n) != getattr(defaults, n)), None)


# ---- by size ------------------------------------------------------------------------------------------------------------


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
            held.append(_Held(ModelShape.of(its), policy.precision, *_kind(recipe, section)))
    shape = held[0].shape
    memory_gb = hardware.memory_gb(train)
    parameters, count, room = shape.parameters, ranks(train), FILLED * memory_gb * 1e9
    fsdp, megatron = _fsdp_total(held, count), _megatron_total(held, count, 1)
    what = f"{parameters / 1e9:.1f}e9 parameters"
    if shape.experts:
        what += f" ({shape.routed / 1e9:.1f}e9 in {shape.experts} experts a layer)"
    if len(held) > 1:
        what += f" and {len(held) - 1} more model{'s' if len(held) > 2 else ''}"
    gpus = f"GB on each of {count} GPUs with {memory_gb:g}"
    if shape.experts >= MANY_EXPERTS and megatron <= room:
        return Choice("megatron", f"{what} take {megatron / 1e9:.1f} {gpus}, and are not gathered layer by layer")
    if fsdp <= room:
        return Choice("dtensor", f"{what} take {fsdp / 1e9:.1f} {gpus}")
    reason = f"under FSDP2 {what} would take {fsdp / 1e9:.1f} {gpus}"
    if megatron <= room:
        return Choice("megatron", reason)
    cuts = [cut for cut in range(2, count + 1) if count % cut == 0 and _megatron_total(held, count, cut) <= room]
    if not cuts:
        raise RecipeError(
            f"cluster.train: {reason}; under Megatron-Core too they do not fit into {FILLED:.0%} of that, however they are cut;"
            " more GPUs, or policy.megatron_cfg.enabled=true or policy.dtensor_cfg.enabled=true to try"
        )
    raise RecipeError(
        f"policy.megatron_cfg: {reason}; Megatron-Core fits if it cuts the model over at least {cuts[0]} GPUs: say how, with"
        " tensor_model_parallel_size, pipeline_model_parallel_size or expert_model_parallel_size"
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """A model of the train ranks."""

    shape: ModelShape
    precision: str
    trained: bool
    offloaded: bool  # the weights of one that is not trained are in host memory while it does not compute


def _kind(recipe: Recipe, section: str) -> tuple[bool, bool]:
    """(trained, offloaded) of the model that a section describes."""
    if section in ("policy", "value"):
        return True, False
    return False, recipe.teacher.cpu_offload if section == "teacher" else config.reward_model(recipe).cpu_offload


def _fsdp_total(held: list[_Held], count: int) -> float:
    """The state of all models, and the layers in use of one at a time."""

    def state(m: _Held) -> float:
        each = STATE_BYTES if m.trained else 0 if m.offloaded else PRECISIONS[m.precision]
        return each * m.shape.parameters / count

    return sum(map(state, held)) + max(_in_use(m.shape, m.precision) for m in held)


def _megatron_total(held: list[_Held], count: int, cut: int) -> float:
    """Frozen weights come to the GPUs whole, so for a while they lie beside the others."""
    return sum(
        megatron_bytes(m.shape.parameters, count, cut, m.precision)
        if m.trained
        else PRECISIONS[m.precision] * m.shape.parameters / cut
        for m in held
    )


def fsdp_bytes(shape: ModelShape, count: int, precision: str) -> float:
    """On each of `count` GPUs: parameters, gradients and Adam's two moments, float32 and cut; and two layers in use."""
    return STATE_BYTES * shape.parameters / count + _in_use(shape, precision)


def _in_use(shape: ModelShape, precision: str) -> float:
    """A layer in use is whole, in the compute precision, with the next one on its way; so is its gradient, before it is
    scattered."""
    return 3 * PRECISIONS[precision] * shape.largest_layer


def megatron_bytes(parameters: int, count: int, cut: int, precision: str) -> float:
    """On each of `count` GPUs: parameters and gradients, cut over `cut` of them, and the optimizer's state, cut over all.

    Bytes per parameter from Megatron-Core's guide to the distributed optimizer, d GPUs sharing the state: 6 + 12/d with
    bfloat16 parameters and float32 gradients, 8 + 8/d with float32 parameters.
    """
    sharing = count / cut
    return parameters / cut * (6 + 12 / sharing if precision == "bfloat16" else 8 + 8 / sharing)
