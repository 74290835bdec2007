"""Choose the train backend, then recomputation.

The recipe chooses the backend, or else the model's size and the number and memory of the GPUs do. The choice is made once, at
submission, and written into the run's recipe, so that all ranks read the same choice.

If the recipe does not choose, the first line that applies decides:
    the run folder exists                           the backend of the run
    keys of one backend's layout are set            that backend
    an optimizer that Megatron-Core does not have   FSDP2
    no GPUs, no model yet, or a family that the Megatron backend does not have   FSDP2
    many experts, and each GPU can hold the model   Megatron-Core: FSDP2 would gather all experts of a layer for every batch
    the model fits under FSDP2                      FSDP2
    otherwise                                       Megatron-Core; an error if its layout's keys must split the model first

A model "fits" if parameters, gradients and optimizer state of all models of the train ranks, as
`launch/plan/memory.py` counts them, take at most 70 % of the GPUs' memory. The rest is for activations and logits.

`launch/plan/recomputation.py` then chooses recomputation and microbatches, where the recipe leaves their keys null.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from launch.plan import recomputation
from launch.plan.memory_parts import TrainModel, models
from launch.plan.rank_division import Parallelism
from launch.plan.rank_memory import of_stages, stages
from launch.preflight.libraries import MEGATRON_OPTIMIZERS
from launch.recipes.model_files import planning_config
from launch.terminal.units import plural
from pipeline import config
from pipeline.config import (
    Backend,
    DTensorConfig,
    MegatronConfig,
    PolicyConfig,
    Problem,
    Recipe,
    RecipeError,
    collected,
    hardware,
    ranks,
    requested_backend,
)
from pipeline.models import FAMILIES
from pipeline.models.shape import ModelShape
from pipeline.models.tensors import can_describe

NAMES: dict[Backend, str] = {"megatron": "Megatron-Core", "dtensor": "FSDP2"}
MANY_EXPERTS = 16  # assumed: Mixtral has 8: a token uses 2 of them, so gathering all 8 moves only four times what it uses
MAX_STATE = 0.7  # assumed: fraction of the GPUs' memory

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
DTENSOR_LAYOUT = (
    "tensor_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "expert_parallel_size",
    "data_parallel_replicate_size",
    "cpu_offload",
    "lora_cfg",
)


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The chosen train backend and recomputation, with the reasons."""

    backend: Backend
    reason: str
    warning: str | None = None
    recomputation: str = ""  # the keys that were chosen for it, and why; empty if the recipe has them
    open_keys: tuple[str, ...] = ()  # those keys; empty also if the run began with them

    def __str__(self) -> str:
        return f"{NAMES[self.backend]} trains, because {self.reason}"


def choose(
    recipe: Recipe, pending: Sequence[os.PathLike] = (), before: Recipe | None = None
) -> tuple[Recipe, BackendChoice | None]:
    """Return (the validated recipe with all chosen keys set, the choice). For an evaluation, return (the same recipe, None).

    pending: folders of runs that this recipe needs and that have not run yet. before: the recipe with which the run began; None
    for a new run. Raises RecipeError.
    """
    if not config.trains(recipe):
        config.validate(recipe)
        return recipe, None
    choice = _by_recipe(recipe) or _by_earlier_run(before) or _by_keys(recipe) or _by_optimizer(recipe)
    choice = choice or _by_size(recipe, pending)
    recipe = config.with_backend(recipe, choice.backend)
    config.validate(recipe)
    if not (keys := recomputation.open_keys(recipe)):
        return recipe, choice
    earlier = before if before and requested_backend(before.policy) == choice.backend else None
    shapes = _known_shapes(recipe, pending) if recipe.cluster.train.gpus_per_node else None
    if shapes and not _have_layers(recipe.policy, shapes["policy"]):
        shapes = None  # the check of the model's layout refuses it
    recipe, reason = recomputation.choose(recipe, shapes, earlier)
    config.validate(recipe)
    return recipe, replace(choice, recomputation=reason, open_keys=() if earlier else keys)


def _have_layers(policy: PolicyConfig, shape: ModelShape) -> bool:
    """Return whether all pipeline stages have layers."""
    return all(stage.layers > 0 for stage in stages(TrainModel(policy, shape), config.uses_megatron(policy)))


def _by_recipe(recipe: Recipe) -> BackendChoice | None:
    backend = requested_backend(recipe.policy)
    if backend is None:
        return None
    enabled = {"megatron": recipe.policy.megatron_cfg.enabled, "dtensor": recipe.policy.dtensor_cfg.enabled}
    if all(enabled.values()):
        contradiction = "policy.megatron_cfg.enabled and policy.dtensor_cfg.enabled are both true; expected one of them"
        return BackendChoice(backend, "policy.megatron_cfg.enabled overrides policy.dtensor_cfg.enabled", contradiction)
    if enabled[backend]:
        return BackendChoice(backend, f"policy.{backend}_cfg.enabled is true")
    disabled = next(name for name in enabled if name != backend)
    return BackendChoice(backend, f"policy.{disabled}_cfg.enabled is false")


def _by_earlier_run(before: Recipe | None) -> BackendChoice | None:
    backend = requested_backend(before.policy) if before else None
    return BackendChoice(backend, "the run began with it") if backend else None


def _by_keys(recipe: Recipe) -> BackendChoice | None:
    policy = recipe.policy
    megatron = _first_change("megatron", policy.megatron_cfg, MegatronConfig(), MEGATRON_LAYOUT)
    dtensor = _first_change("dtensor", policy.dtensor_cfg, DTensorConfig(), DTENSOR_LAYOUT)
    if megatron and dtensor:
        message = (
            f"got this key, which Megatron-Core reads, and {dtensor}, which FSDP2 reads; expected keys of one backend. Try"
            " policy.megatron_cfg.enabled=true or policy.dtensor_cfg.enabled=true"
        )
        raise RecipeError(Problem(megatron, "ambiguous", message))
    if megatron or dtensor:
        return BackendChoice("megatron" if megatron else "dtensor", f"{megatron or dtensor} is set")
    return None


def _by_optimizer(recipe: Recipe) -> BackendChoice | None:
    name = recipe.policy.optimizer.name
    if name in MEGATRON_OPTIMIZERS or recipe.policy.megatron_cfg.optimizer is not None:
        return None
    return BackendChoice("dtensor", f"Megatron-Core does not have {name}")


def _first_change(backend: Backend, section: Any, defaults: Any, names: tuple[str, ...]) -> str | None:
    """Return the dotted name of the first of these keys whose value is not the default; None if all have their defaults."""
    return next((f"policy.{backend}_cfg.{n}" for n in names if getattr(section, n) != getattr(defaults, n)), None)


# ---- by size ------------------------------------------------------------------------------------------------------------


def fsdp_bytes(train_models: Sequence[TrainModel], count: int) -> float:
    """Return the bytes on each of `count` GPUs under FSDP2: the state of all models, and the gathered layers of one model.

    One model computes at a time. Three tensors as large as its largest layer are whole, in the compute precision: the current
    layer, the prefetched next layer, and the gradient before its reduce-scatter.
    """
    state = sum(sum(of_stages(model, Parallelism(count), True, False)[0].resident.values()) for model in train_models)
    return state + max(3 * model.size * model.shape.largest_layer for model in train_models)


def megatron_bytes(train_models: Sequence[TrainModel], count: int, size: int) -> float:
    """Return the bytes of the state of all models on each of `count` GPUs, if `size` tensor-parallel GPUs split each model.

    Offloaded frozen models count too, because while they compute they are on the GPUs together with the other models.
    """
    cut = Parallelism(count, tensor=size, expert_tensor=size)
    ranks = (of_stages(replace(model, offload=False), cut, True, True)[0] for model in train_models)
    return sum(sum(rank.resident.values()) for rank in ranks)


def _configs(recipe: Recipe, pending: Sequence[os.PathLike]) -> dict[str, dict[str, Any]] | None:
    """Return section -> config.json of its model, for all models; None if the policy is the output of a run that is pending.

    Other models that a pending run will write are assumed to have the policy's config.json. Raises RecipeError.
    """
    model = planning_config(recipe.policy, pending)
    if model is None:
        return None
    policies = config.models(recipe).items()
    return {section: planning_config(policy, pending, f"{section}.model_name") or model for section, policy in policies}


def _known_shapes(recipe: Recipe, pending: Sequence[os.PathLike]) -> dict[str, ModelShape] | None:
    """Return section -> shape of its model, for all models; None if a shape is not known. A plan reports the reason."""
    with collected([]):
        if (configs := _configs(recipe, pending)) is not None:
            return {section: ModelShape.of(model, f"{section}.model_name") for section, model in configs.items()}
    return None


def _by_size(recipe: Recipe, pending: Sequence[os.PathLike]) -> BackendChoice:
    train = recipe.cluster.train
    if not train.gpus_per_node:
        return BackendChoice("dtensor", "cluster.train has no GPUs")
    if not can_describe():
        return BackendChoice("dtensor", "torch and transformers, which tell the size of a model, are not installed here")
    configs = _configs(recipe, pending)
    if configs is None:
        return BackendChoice("dtensor", f"{recipe.policy.model_name} does not exist yet, so its size is unknown")
    shapes = {}
    for section, model in configs.items():
        if (family := model.get("model_type")) not in FAMILIES:
            return BackendChoice("dtensor", f"the Megatron backend has no '{family}' models")
        shapes[section] = ModelShape.of(model, f"{section}.model_name")
    train_models = models(recipe, shapes)
    count, memory_gb = ranks(train), hardware.memory_gb(train)
    limit, fsdp, megatron = MAX_STATE * memory_gb * 1e9, fsdp_bytes(train_models, count), megatron_bytes(train_models, count, 1)
    models_text, gpus = _describe(train_models), f"GB on each of {count} GPUs with {memory_gb:g} GB"
    if train_models[0].shape.experts >= MANY_EXPERTS and megatron <= limit:
        return BackendChoice(
            "megatron", f"{models_text} take {megatron / 1e9:.1f} {gpus}, and Megatron-Core does not gather them layer by layer"
        )
    if fsdp <= limit:
        return BackendChoice("dtensor", f"{models_text} take {fsdp / 1e9:.1f} {gpus}")
    reason = f"under FSDP2 {models_text} would take {fsdp / 1e9:.1f} {gpus}"
    if megatron <= limit:
        return BackendChoice("megatron", reason)
    cuts = [cut for cut in range(2, count + 1) if count % cut == 0 and megatron_bytes(train_models, count, cut) <= limit]
    if not cuts:
        message = (
            f"{reason}; under Megatron-Core no layout needs less than {MAX_STATE:.0%} of a GPU's memory. Try more GPUs, or"
            " choose the backend by policy.megatron_cfg.enabled=true or policy.dtensor_cfg.enabled=true"
        )
        raise RecipeError(Problem("cluster.train", "out-of-memory", message))
    message = (
        f"{reason}; under Megatron-Core they fit if at least {cuts[0]} GPUs split the model. Try a larger"
        " tensor_model_parallel_size, pipeline_model_parallel_size or expert_model_parallel_size"
    )
    raise RecipeError(Problem("policy.megatron_cfg", "out-of-memory", message))


def _describe(train_models: Sequence[TrainModel]) -> str:
    shape, more_models = train_models[0].shape, len(train_models) - 1
    experts = f" ({shape.routed / 1e9:.1f}e9 in {shape.experts} experts a layer)" if shape.experts else ""
    addition = f" and {plural(more_models, 'more model')}" if more_models else ""
    return f"{shape.parameters / 1e9:.1f}e9 parameters{experts}{addition}"
