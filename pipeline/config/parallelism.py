"""Select the backend that a recipe names, and check that its parallel layout divides the ranks, from the recipe alone.

`launch/preflight/architecture.py` checks the layout against the model: heads, layers, experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from pipeline.config.cluster import ComponentConfig, ranks, ranks_per_node
from pipeline.config.other_models import serves_rewards
from pipeline.config.policy import PolicyConfig
from pipeline.config.schema import Recipe, expert_tensor_parallel_size, generates, trains
from pipeline.recipe.problems import Problem, refuse

Backend = Literal["megatron", "dtensor"]

DTENSOR = "policy.dtensor_cfg"
MEGATRON = "policy.megatron_cfg"
REPLICAS = "data_parallel_replicate_size"
LAYOUTS: dict[Backend, tuple[str, tuple[str, ...]]] = {
    "megatron": (MEGATRON, ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")),
    "dtensor": (DTENSOR, ("tensor_parallel_size", "context_parallel_size", REPLICAS)),
}
"""Backend -> its section, and the keys whose product must divide the ranks. FSDP2's replicas are data-parallel ranks."""
EXPERT_LAYOUTS: dict[Backend, tuple[str, ...]] = {
    "megatron": ("expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size"),
    "dtensor": ("expert_parallel_size", REPLICAS),
}
"""The same for experts."""
LARGEST_NAMED = 1024  # largest divisor that a message suggests


def requested_backend(policy: PolicyConfig) -> Backend | None:
    """Return the backend that the two `enabled` keys select; None if they leave the choice open.

    If both keys are true, the backend is Megatron-Core. Raise RecipeError if both are false.
    """
    refuse(check_requested_backend(policy))
    return named_backend(policy)


def named_backend(policy: PolicyConfig) -> Backend | None:
    """Return the backend that the two `enabled` keys select; None if they leave the choice open or are both false."""
    return backend_of(policy.megatron_cfg.enabled, policy.dtensor_cfg.enabled)


def backend_of(megatron: bool | None, dtensor: bool | None) -> Backend | None:
    """Return the backend that two values of `enabled` select; None if they leave the choice open."""
    if megatron is True or (dtensor is False and megatron is None):
        return "megatron"
    return "dtensor" if dtensor is True or (megatron is False and dtensor is None) else None


def check_requested_backend(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield a problem if both backends are disabled."""
    if policy.megatron_cfg.enabled is False and policy.dtensor_cfg.enabled is False:
        message = (
            f"got false, and {DTENSOR}.enabled=false too; expected one true, or both null for a choice by the model's size"
        )
        yield Problem(f"{MEGATRON}.enabled", "contradiction", message)


def colocated(recipe: Recipe) -> bool:
    """Return whether the train and generate ranks of a node take turns on its GPUs."""
    return generates(recipe) and trains(recipe) and recipe.policy.generation.colocated.enabled


def components_on_train_nodes(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of the other components whose ranks are on cluster.train's nodes."""
    if colocated(recipe):
        return ("generate",)
    return ("generate", "reward", "judge") if recipe.cluster.share_nodes else ()


def refits_by_ipc(recipe: Recipe) -> bool:
    """Return whether refits use IPC: train and generate ranks on a node map each other's staging memory."""
    generation = recipe.policy.generation
    return colocated(recipe) and generation.colocated.refit == "ipc" and generation.refit_transport != "broadcast"


def with_backend(recipe: Recipe, backend: Backend) -> Recipe:
    """Return a copy of the recipe in which both `enabled` keys select `backend`."""
    policy, megatron = recipe.policy, backend == "megatron"
    sections = {
        "megatron_cfg": replace(policy.megatron_cfg, enabled=megatron),
        "dtensor_cfg": replace(policy.dtensor_cfg, enabled=not megatron),
    }
    return replace(recipe, policy=replace(policy, **sections))


def check_layout(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem if the ranks that hold models cannot be divided as the backend's keys require."""
    yield from check_requested_backend(recipe.policy)
    if backend := named_backend(recipe.policy):
        undivided = list(_check_ranks(recipe.policy, backend, recipe.cluster.train, "train"))
        yield from undivided or _check_global_batch(recipe, backend)
        if serves_rewards(recipe):  # the reward model has the policy's layout
            yield from _check_ranks(recipe.policy, backend, recipe.cluster.reward, "reward")


def _check_ranks(policy: PolicyConfig, backend: Backend, component: ComponentConfig, realm: str) -> Iterator[Problem]:
    """Yield a problem for each layout that megatron.core.parallel_state or `pipeline.train.fsdp_mesh` would refuse."""
    section, sizes = LAYOUTS[backend]
    values = policy.megatron_cfg if backend == "megatron" else policy.dtensor_cfg
    yield from (found := list(check_divides(section, {name: getattr(values, name) for name in sizes}, component, realm)))
    experts, m = EXPERT_LAYOUTS[backend], policy.megatron_cfg
    # Without Megatron-Core's expert parallelism experts have the layout of other weights.
    if not found or (backend == "megatron" and m.expert_model_parallel_size > 1):
        expert_sizes = {name: getattr(values, name) for name in experts}
        if backend == "megatron":
            expert_sizes["expert_tensor_parallel_size"] = expert_tensor_parallel_size(m)
        yield from check_divides(section, expert_sizes, component, realm)
    if values.sequence_parallel and getattr(values, sizes[0]) == 1:
        message = f"got true with {section}.{sizes[0]}=1; expected more ranks to shard sequences over, or false"
        yield Problem(f"{section}.sequence_parallel", "contradiction", message)
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage") if backend == "megatron" else ():
        if getattr(m, name) is not None and m.pipeline_model_parallel_size == 1:
            message = (
                f"got {getattr(m, name)} with one pipeline stage. Try {MEGATRON}.pipeline_model_parallel_size above 1, or null"
            )
            yield Problem(f"{MEGATRON}.{name}", "has-no-effect", message)


def check_divides(section: str, sizes: Mapping[str, int], component: ComponentConfig, realm: str) -> Iterator[Problem]:
    """Yield a problem if a component's number of ranks is not a multiple of the product of `sizes`.

    sizes: name of a key in `section` -> parallel size. The problem names the first key of which another value would suffice.
    """
    count, product = ranks(component), math.prod(sizes.values())
    if count % product == 0:
        return
    cuts = {name: size for name, size in sizes.items() if size > 1}
    fits = [name for name, size in cuts.items() if count % (product // size) == 0]
    name = next(iter(fits or cuts))
    size, left = cuts[name], count // (product // cuts[name])
    names = " x ".join(f"{cut} {value}" for cut, value in cuts.items())
    got = f"got {size}; the product {names} is {product}, which" if len(cuts) > 1 else f"got {size}, which"
    divisors = [k for k in range(1, min(left, LARGEST_NAMED) + 1) if left % k == 0] if fits else []
    if (shared := math.gcd(left, size)) > 1:  # a divisor of `size` divides the model's heads and experts wherever `size` does
        divisors = [k for k in divisors if shared % k == 0]
    near = [*[k for k in divisors if k < size][-1:], *[k for k in divisors if k > size][:1]]
    expected = "a smaller product" if not fits else f"a divisor of {left}" if left > 1 else "1"
    step = product // math.gcd(product, ranks_per_node(component))
    nodes = f"cluster.{realm}.nodes={math.ceil(component.nodes / step) * step}"
    message = (
        f"{got} does not divide the {count} ranks of cluster.{realm} (nodes {component.nodes} x {ranks_per_node(component)} per"
        f" node); expected {expected}. Try {', or '.join(filter(None, (' or '.join(map(str, near)), nodes)))}"
    )
    yield Problem(f"{section}.{name}", "not-divisible", message)


def data_parallel_size(recipe: Recipe, backend: Backend) -> int:
    """Return the number of data-parallel ranks, which hold different samples of a batch."""
    _, sizes = LAYOUTS[backend]
    values = recipe.policy.megatron_cfg if backend == "megatron" else recipe.policy.dtensor_cfg
    return ranks(recipe.cluster.train) // math.prod(getattr(values, name) for name in sizes if name != REPLICAS)


def check_expert_layout(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield a problem for layouts of mixtures of experts that Megatron-Core computes wrongly, or refuses in training.

    Without expert parallelism (EP 1) Megatron-Core reduces the gradients of experts like those of other weights, over ranks
    with the same tensor-parallel part. If experts are sharded differently (ETP != TP), the sum lacks terms or mixes parts,
    without an error: `allreduce` in megatron/core/tensor_parallel/layers.py.
    """
    m = policy.megatron_cfg
    tensor, expert_tensor = m.tensor_model_parallel_size, expert_tensor_parallel_size(m)
    if m.expert_model_parallel_size == 1 and expert_tensor != tensor:
        message = (
            f"got {expert_tensor} with {MEGATRON}.tensor_model_parallel_size={tensor} and expert_model_parallel_size=1, which"
            " silently gives experts wrong gradients. Try null, or a larger expert_model_parallel_size"
        )
        yield Problem(f"{MEGATRON}.expert_tensor_parallel_size", "unsupported", message)
    if tensor > 1 and not m.sequence_parallel:
        message = f"got false; expected true for a mixture of experts with {MEGATRON}.tensor_model_parallel_size={tensor}"
        yield Problem(f"{MEGATRON}.sequence_parallel", "unsupported", message)


def _check_global_batch(recipe: Recipe, backend: Backend) -> Iterator[Problem]:
    given, size = recipe.policy.train_global_batch_size, data_parallel_size(recipe, backend)
    if given < size:
        message = f"got {given} sequences; expected at least {size}, one for each data-parallel rank"
        yield Problem("policy.train_global_batch_size", "too-small", message)
