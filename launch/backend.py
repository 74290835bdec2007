"""Choose the backend that trains: the one that the recipe asks for, else by the model's size, the GPUs and their memory.

Decided once, at submission, and written into the run's recipe, so that every rank reads the same.

The rule, where the recipe leaves it open; the first line that applies:
    the run folder exists                           as the run began
    keys of one backend's layout are set            that backend
    no GPUs; the model is not there yet; a family that the Megatron backend does not have   FSDP2
    many experts, and each GPU can hold the model   Megatron-Core: FSDP2 would gather all experts of a layer for every batch
    the model fits under FSDP2                      FSDP2
    otherwise                                       Megatron-Core; if its layout's keys must cut the model first, that is said

A model "fits" if parameters, gradients and optimizer state, as `launch/plan/memory_backends.py` counts them for all models
of the train ranks, take at most 70 % of the GPUs' memory. Activations and logits are not counted: they have the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.model_files import planning_config
from launch.model_shape import ModelShape
from launch.plan.cut import Cut
from launch.plan.memory_backends import FSDP, Megatron, stages
from launch.plan.memory_parts import Model, models
from launch.units import plural
from pipeline import config
from pipeline.config import (
    MEGATRON_MODEL_TYPES,
    Backend,
    DTensorConfig,
    MegatronConfig,
    Problem,
    Recipe,
    RecipeError,
    hardware,
    ranks,
    requested_backend,
)

NAMES: dict[Backend, str] = {"megatron": "Megatron-Core", "dtensor": "FSDP2"}
MANY_EXPERTS = 16  # Mixtral's 8 are few: a token passes 2 of them, and gathering all costs four times what it uses
FILLED = 0.7  # of the memory

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
class BackendChoice:
    backend: Backend
    reason: str
    warning: str | None = None

    def __str__(self) -> str:
        return f"{NAMES[self.backend]} trains, because {self.reason}"


def choose(recipe: Recipe, pending: list[Path] = (), before: Recipe | None = None) -> tuple[Recipe, BackendChoice]:
    """Return the recipe with both `enabled` keys set and everything checked that depends on them, and why.

    pending: run folders of needed recipes that have not run yet. before: the recipe that the run began with, if it has begun.
    Raises RecipeError.
    """
    choice = _asked_for(recipe) or _as_before(before) or _by_keys(recipe) or _by_size(recipe, pending)
    recipe = config.with_backend(recipe, choice.backend)
    config.validate(recipe)
    return recipe, choice


def _asked_for(recipe: Recipe) -> BackendChoice | None:
    backend = requested_backend(recipe.policy)
    if backend is None:
        return None
    given = {"megatron": recipe.policy.megatron_cfg.enabled, "dtensor": recipe.policy.dtensor_cfg.enabled}
    if all(given.values()):
        both = "policy.megatron_cfg.enabled and policy.dtensor_cfg.enabled are both true; one of them is enough"
        return BackendChoice(backend, "policy.megatron_cfg.enabled goes before policy.dtensor_cfg.enabled", both)
    if given[backend]:
        return BackendChoice(backend, f"policy.{backend}_cfg.enabled is true")
    other = next(name for name in given if name != backend)
    return BackendChoice(backend, f"policy.{other}_cfg.enabled is false")


def _as_before(before: Recipe | None) -> BackendChoice | None:
    backend = requested_backend(before.policy) if before else None
    return BackendChoice(backend, "the run began with it") if backend else None


def _by_keys(recipe: Recipe) -> BackendChoice | None:
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
        return BackendChoice("megatron" if megatron else "dtensor", f"{megatron or dtensor} is set")
    return None


def _changed(backend: Backend, section: Any, defaults: Any, names: tuple[str, ...]) -> str | None:
    """Return the first of the keys that is not at its default."""
    return next((f"policy.{backend}_cfg.{n}" for n in names if getattr(section, n) != getattr(defaults, n)), None)


# ---- by size ------------------------------------------------------------------------------------------------------------


def fsdp_bytes(held: Sequence[Model], count: int) -> float:
    """Return the bytes on each of `count` GPUs: the state of all models, and the layers in use of one at a time.

    A layer in use is whole, in the compute precision, with the next one on its way; so is its gradient, before it is scattered.
    """
    state = sum(sum(FSDP(model, Cut(count), True).resident.values()) for model in held)
    return state + max(3 * model.size * model.shape.largest_layer for model in held)


def megatron_bytes(held: Sequence[Model], count: int, size: int) -> float:
    """Return the bytes of the state of all models on each of `count` GPUs, of which `size` cut a model.

    Frozen weights come to the GPUs whole, so for a while they are there beside the others.
    """
    cut = Cut(count, tensor=size, expert_tensor=size)
    ranks = (Megatron(replace(model, offload=False), cut, True, stages(model)[0]) for model in held)
    return sum(sum(rank.resident.values()) for rank in ranks)


def _by_size(recipe: Recipe, pending: list[Path]) -> BackendChoice:
    train = recipe.cluster.train
    if not train.gpus_per_node:
        return BackendChoice("dtensor", "cluster.train has no GPUs")
    model = planning_config(recipe.policy, pending)
    if model is None:
        return BackendChoice("dtensor", f"{recipe.policy.model_name} is not there yet, so its size is not known")
    shapes = {}
    for section, policy in config.models(recipe).items():
        key = f"{section}.model_name"
        its = planning_config(policy, pending, key) or model  # what a run has yet to leave: as the policy
        if (family := its.get("model_type")) not in MEGATRON_MODEL_TYPES:
            return BackendChoice("dtensor", f"the Megatron backend has no '{family}' models")
        shapes[section] = ModelShape.of(its, key)
    held = models(recipe, shapes)
    count, memory_gb = ranks(train), hardware.memory_gb(train)
    room, fsdp, megatron = FILLED * memory_gb * 1e9, fsdp_bytes(held, count), megatron_bytes(held, count, 1)
    what, gpus = _described(held), f"GB on each of {count} GPUs with {memory_gb:g}"
    if held[0].shape.experts >= MANY_EXPERTS and megatron <= room:
        return BackendChoice("megatron", f"{what} take {megatron / 1e9:.1f} {gpus}, and are not gathered layer by layer")
    if fsdp <= room:
        return BackendChoice("dtensor", f"{what} take {fsdp / 1e9:.1f} {gpus}")
    reason = f"under FSDP2 {what} would take {fsdp / 1e9:.1f} {gpus}"
    if megatron <= room:
        return BackendChoice("megatron", reason)
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


def _described(held: Sequence[Model]) -> str:
    shape, others = held[0].shape, len(held) - 1
    experts = f" ({shape.routed / 1e9:.1f}e9 in {shape.experts} experts a layer)" if shape.experts else ""
    more = f" and {plural(others, 'more model')}" if others else ""
    return f"{shape.parameters / 1e9:.1f}e9 parameters{experts}{more}"
