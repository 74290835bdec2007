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
not counted, they have the rest. The algorithms so far keep one trained model on the GPUs and the reference in host memory,
so the algorithm does not change what fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.model_files import model_config
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
    ranks,
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
DTENSOR_LAYOUT = ("tensor_parallel_size", "cpu_offload")


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
    train, precision = recipe.cluster.train, recipe.policy.precision
    if not train.gpus_per_node:
        return Choice("dtensor", "cluster.train has no GPUs")
    model = model_config(recipe.policy, pending)
    if model is None:
        return Choice("dtensor", f"{recipe.policy.model_name} is not there yet, so its size is not known")
    for section, other in config.models(recipe).items():
        family = (model_config(other, pending, f"{section}.model_name") or model).get("model_type")
        if family not in MEGATRON_MODEL_TYPES:
            return Choice("dtensor", f"the Megatron backend has no '{family}' models")
    shape = ModelShape.of(model)
    parameters, count, room = shape.parameters, ranks(train), FILLED * train.gpu_memory_gb * 1e9
    fsdp, megatron = fsdp_bytes(shape, count, precision), megatron_bytes(parameters, count, 1, precision)
    what = f"{parameters / 1e9:.1f}e9 parameters"
    if shape.experts:
        what += f" ({shape.routed / 1e9:.1f}e9 in {shape.experts} experts a layer)"
    gpus = f"GB on each of {count} GPUs with {train.gpu_memory_gb:g}"
    if shape.experts >= MANY_EXPERTS and megatron <= room:
        return Choice("megatron", f"{what} take {megatron / 1e9:.1f} {gpus}, and are not gathered layer by layer")
    if fsdp <= room:
        return Choice("dtensor", f"{what} take {fsdp / 1e9:.1f} {gpus}")
    reason = f"under FSDP2 {what} would take {fsdp / 1e9:.1f} {gpus}"
    if megatron <= room:
        return Choice("megatron", reason)
    cuts = [
        cut for cut in range(2, count + 1) if count % cut == 0 and megatron_bytes(parameters, count, cut, precision) <= room
    ]
    if not cuts:
        raise RecipeError(
            f"cluster.train: {reason}; under Megatron-Core too they do not fit into {FILLED:.0%} of that, however they are cut;"
            " more GPUs, or policy.megatron_cfg.enabled=true or policy.dtensor_cfg.enabled=true to try"
        )
    raise RecipeError(
        f"policy.megatron_cfg: {reason}; Megatron-Core fits if it cuts the model over at least {cuts[0]} GPUs: say how, with"
        " tensor_model_parallel_size, pipeline_model_parallel_size or expert_model_parallel_size"
    )


def fsdp_bytes(shape: ModelShape, count: int, precision: str) -> float:
    """On each of `count` GPUs: parameters, gradients and Adam's two moments, float32 and cut; and two layers in use.

    A layer in use is whole, in the compute precision, with the next one on its way; so is its gradient, before it is
    scattered.
    """
    return 16 * shape.parameters / count + 3 * PRECISIONS[precision] * shape.largest_layer


def megatron_bytes(parameters: int, count: int, cut: int, precision: str) -> float:
    """On each of `count` GPUs: parameters and gradients, cut over `cut` of them, and the optimizer's state, cut over all.

    Bytes per parameter from Megatron-Core's guide to the distributed optimizer, d GPUs sharing the state: 6 + 12/d with
    bfloat16 parameters and float32 gradients, 8 + 8/d with float32 parameters.
    """
    sharing = count / cut
    return parameters / cut * (6 + 12 / sharing if precision == "bfloat16" else 8 + 8 / sharing)
