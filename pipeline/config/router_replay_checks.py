"""Check `policy.router_replay` from the recipe alone.

`pipeline/models/backend_support.py` checks that the model has experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.parallelism import DTENSOR, named_backend
from pipeline.config.schema import Recipe, generates, trains
from pipeline.recipe.problems import Problem

KEY = "policy.router_replay.enabled"


def check_router_replay(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem for each key that router replay cannot be combined with."""
    policy, vllm = recipe.policy, recipe.policy.generation.vllm_cfg
    if not policy.router_replay.enabled:
        return
    if not generates(recipe) or not trains(recipe):
        without = "samples nothing" if trains(recipe) else "trains nothing"
        yield Problem(KEY, "has-no-effect", f"got true, but {recipe.algorithm} {without}. Try false")
        return
    if (backend := policy.generation.backend) != "vllm":
        message = f"got {backend} with {KEY}=true; expected vllm, which records the experts that it chooses"
        yield Problem("policy.generation.backend", "unsupported", message)
    if (stages := vllm.pipeline_parallel_size) > 1:
        message = f"got {stages} with {KEY}=true; expected 1, since vLLM records the experts of one stage only"
        yield Problem("policy.generation.vllm_cfg.pipeline_parallel_size", "unsupported", message)
    if not vllm.enable_prefix_caching:
        message = f"got false with {KEY}=true; expected true: vLLM keeps the recorded experts beside its cache. Try without it"
        yield Problem("policy.generation.vllm_cfg.enable_prefix_caching", "contradiction", message)
    if named_backend(policy) != "megatron" and policy.dtensor_cfg.compile:
        message = f"got true with {KEY}=true; expected false, since compiled layers cannot take other experts"
        yield Problem(f"{DTENSOR}.compile", "contradiction", message)
