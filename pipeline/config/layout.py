"""Which backend trains, and whether the ranks divide as it needs them to, as far as the recipe alone can tell.

What the model has to say (heads, layers, experts) is in `launch/preflight/architecture.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from pipeline.config.cluster import ComponentConfig, ranks, ranks_per_node
from pipeline.config.errors import refuse
from pipeline.config.models import serves_rewards
from pipeline.config.policy import PolicyConfig
from pipeline.config.schema import Recipe, expert_tensor_parallel_size, generates

Backend = Literal["megatron", "dtensor"]

DTENSOR = "policy.dtensor_cfg"
MEGATRON = "policy.megatron_cfg"
LARGEST_NAMED = 1024  # of the sizes that would divide


def asked_backend(policy: PolicyConfig) -> Backend | None:
    """What the two `enabled` keys say; None if they leave it open. Both true is Megatron, both false raises RecipeError."""
    refuse(check_asked_backend(policy))
    return named_backend(policy)


def named_backend(policy: PolicyConfig) -> Backend | None:
    """The same, and None too where both are false."""
    return backend_of(policy.megatron_cfg.enabled, policy.dtensor_cfg.enabled)


def backend_of(megatron: bool | None, dtensor: bool | None) -> Backend | None:
    """What two values of `enabled` say."""
    if megatron is True or (dtensor is False and megatron is None):
        return "megatron"
    return "dtensor" if dtensor is True or (megatron is False and dtensor is None) else None


def check_asked_backend(policy: PolicyConfig) -> Iterator[str]:
    if policy.megatron_cfg.enabled is False and policy.dtensor_cfg.enabled is False:
        yield (
            f"{MEGATRON}.enabled, {DTENSOR}.enabled: both false leaves no training backend; one of them true, or both null for"
            " a choice by the size of the model"
        )


def colocated(recipe: Recipe) -> bool:
    """Whether the train and the generate ranks of a node share its GPUs and take turns."""
    return generates(recipe) and recipe.policy.generation.colocated.enabled


def refits_by_ipc(recipe: Recipe) -> bool:
    """Return whether train and generate ranks of a node map the memory that a refit is staged in."""
    generation = recipe.policy.generation
    return colocated(recipe) and generation.colocated.refit == "ipc" and generation.refit_transport != "broadcast"


def decided(recipe: Recipe, backend: Backend) -> Recipe:
    """The same recipe with both `enabled` keys set."""
    policy, megatron = recipe.policy, backend == "megatron"
    sections = {
        "megatron_cfg": replace(policy.megatron_cfg, enabled=megatron),
        "dtensor_cfg": replace(policy.dtensor_cfg, enabled=not megatron),
    }
    return replace(recipe, policy=replace(policy, **sections))


def check_layout(recipe: Recipe) -> Iterator[str]:
    """A problem if the ranks that hold models cannot be divided as the chosen backend's keys have it."""
    yield from check_asked_backend(recipe.policy)
    if backend := named_backend(recipe.policy):
        undivided = list(_check_ranks(recipe.policy, backend, recipe.cluster.train, "train"))
        yield from undivided or _check_global_batch(recipe, backend)
        if serves_rewards(recipe):  # the reward model is cut as the policy is, so the same keys must divide its ranks
            yield from _check_ranks(recipe.policy, backend, recipe.cluster.reward, "reward")


def _check_ranks(policy: PolicyConfig, backend: Backend, component: ComponentConfig, realm: str) -> Iterator[str]:
    """A problem if a realm's ranks cannot be divided as the policy's layout has it."""
    if backend == "megatron":
        yield from _check_megatron(policy, component, realm)
    else:
        yield from check_divides(f"{DTENSOR}.tensor_parallel_size", policy.dtensor_cfg.tensor_parallel_size, component, realm)


def check_divides(key: str, size: int, component: ComponentConfig, realm: str) -> Iterator[str]:
    """A problem if a realm's ranks are no multiple of `size` ranks that belong together. `key`: what says so."""
    count = ranks(component)
    if count % size:
        divisors = ", ".join(str(k) for k in range(1, min(count, LARGEST_NAMED) + 1) if count % k == 0)
        yield (
            f"{key}: {size} does not divide the {count} ranks of cluster.{realm} (nodes {component.nodes} x"
            f" {ranks_per_node(component)} per node); one of {divisors} would"
        )


def data_parallel_size(recipe: Recipe, backend: Backend) -> int:
    """How many train ranks hold different samples of a batch."""
    policy = recipe.policy
    if backend == "megatron":
        m = policy.megatron_cfg
        share = m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size
    else:
        share = policy.dtensor_cfg.tensor_parallel_size
    return ranks(recipe.cluster.train) // share


def _check_megatron(policy: PolicyConfig, component: ComponentConfig, realm: str) -> Iterator[str]:
    """What megatron.core.parallel_state and ModelParallelConfig would refuse, and the same for experts."""
    m = policy.megatron_cfg
    tensor, pipeline, context = m.tensor_model_parallel_size, m.pipeline_model_parallel_size, m.context_parallel_size
    found = list(
        check_divides(
            f"{MEGATRON}: tensor_model_parallel_size {tensor} x pipeline_model_parallel_size {pipeline} x context_parallel_size"
            f" {context}",
            tensor * pipeline * context,
            component,
            realm,
        )
    )
    yield from found
    expert, expert_tensor = m.expert_model_parallel_size, expert_tensor_parallel_size(m)
    if not found or expert > 1:  # experts that are not spread are cut as the rest is
        yield from check_divides(
            f"{MEGATRON}: expert_model_parallel_size {expert} x expert_tensor_parallel_size {expert_tensor} x"
            f" pipeline_model_parallel_size {pipeline}",
            expert * expert_tensor * pipeline,
            component,
            realm,
        )
    if m.sequence_parallel and tensor == 1:
        yield (
            f"{MEGATRON}.sequence_parallel: true cuts sequences over the tensor-parallel ranks, and"
            " tensor_model_parallel_size is 1; make that more, or this false"
        )
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if getattr(m, name) is not None and pipeline == 1:
            yield f"{MEGATRON}.{name}: there is one stage only; pipeline_model_parallel_size makes more"


def check_expert_layout(policy: PolicyConfig) -> Iterator[str]:
    """Of a mixture of experts. A problem for layouts that Megatron-Core gets wrong, or refuses when it trains.

    With experts not spread (EP 1) Megatron-Core reduces their gradients as it does those of other weights, over ranks with the
    same tensor-parallel part. Cut otherwise than those (ETP != TP), the sum lacks terms or mixes parts, and nothing is said:
    `allreduce` in megatron/core/tensor_parallel/layers.py.
    """
    m = policy.megatron_cfg
    tensor, expert_tensor = m.tensor_model_parallel_size, expert_tensor_parallel_size(m)
    if m.expert_model_parallel_size == 1 and expert_tensor != tensor:
        yield (
            f"{MEGATRON}.expert_tensor_parallel_size: {expert_tensor} with tensor_model_parallel_size {tensor} and"
            " expert_model_parallel_size 1 gives wrong gradients of the experts, without an error; leave it null, or spread"
            " the experts with expert_model_parallel_size"
        )
    if tensor > 1 and not m.sequence_parallel:
        yield (
            f"{MEGATRON}.sequence_parallel: false, but a mixture of experts with tensor_model_parallel_size {tensor} trains"
            " only with true"
        )


def _check_global_batch(recipe: Recipe, backend: Backend) -> Iterator[str]:
    size = data_parallel_size(recipe, backend)
    if recipe.policy.train_global_batch_size < size:
        yield (
            f"policy.train_global_batch_size: {recipe.policy.train_global_batch_size} sequences cannot be shared among {size}"
            f" data-parallel ranks; at least {size}"
        )
