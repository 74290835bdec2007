"""Check `policy.generation.lora_refit`, of adapters that either backend trains."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.megatron import MegatronLoRAConfig
from pipeline.config.parallelism import DTENSOR, MEGATRON, named_backend
from pipeline.config.policy import LoRAConfig, PolicyConfig
from pipeline.config.schema import Recipe
from pipeline.recipe.problems import Problem

SERVED_DIM = 512
"""The greatest rank of adapters that vLLM serves. A test compares it with vLLM."""


def check_lora_refit(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each key with which engines cannot serve adapters."""
    policy, generation = recipe.policy, recipe.policy.generation
    if generation.lora_refit != "adapter":
        return
    key, (section, lora) = "policy.generation.lora_refit", _adapters(policy)
    stages = generation.vllm_cfg.pipeline_parallel_size
    for found, what, why in (
        (not lora.enabled, f"{section}.enabled=false", "there are no adapters"),
        (lora.use_dora, f"{section}.use_dora=true", "vLLM has no DoRA"),
        (lora.dim > SERVED_DIM, f"{section}.dim={lora.dim}", f"vLLM serves ranks up to {SERVED_DIM}"),
        (generation.backend != "vllm", f"policy.generation.backend={generation.backend}", "it serves merged weights"),
        (policy.random_init, "policy.random_init=true", "engines read the base weights from files"),
        (generation.refit_transport == "delta", "policy.generation.refit_transport=delta", "it compares whole weights"),
        (generation.colocated.enabled, "policy.generation.colocated.enabled=true", "sleeping engines drop the base weights"),
        (stages > 1, f"policy.generation.vllm_cfg.pipeline_parallel_size={stages}", "a stage has only some of the layers"),
    ):
        if found:
            yield Problem(key, "contradiction", f"got adapter with {what}; expected merged, since {why}. Try {key}=merged")


def _adapters(policy: PolicyConfig) -> tuple[str, LoRAConfig | MegatronLoRAConfig]:
    """Return (key, section) of the backend's adapters; while the recipe leaves the backend open, of those that are enabled."""
    dtensor, megatron, backend = policy.dtensor_cfg.lora_cfg, policy.megatron_cfg.peft, named_backend(policy)
    if backend == "megatron" or (backend is None and megatron.enabled and not dtensor.enabled):
        return f"{MEGATRON}.peft", megatron
    return f"{DTENSOR}.lora_cfg", dtensor
