"""Check `policy.router_replay` and `policy.moe_aux_loss_coeff` from the recipe alone.

`pipeline/models/backend_support.py` checks that the model has experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.parallelism import DTENSOR, MEGATRON, named_backend
from pipeline.config.schema import Recipe, adapters, generates, trains
from pipeline.recipe.problems import Problem

KEY = "policy.router_replay.enabled"
BALANCE = "policy.moe_aux_loss_coeff"


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


def check_load_balancing(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem if the load-balancing loss has no router to train, and for keys that it cannot be combined with."""
    policy = recipe.policy
    if not policy.moe_aux_loss_coeff:
        return
    got, megatron = f"got {policy.moe_aux_loss_coeff:g}", named_backend(policy) == "megatron"
    if not trains(recipe):
        yield Problem(BALANCE, "has-no-effect", f"{got}, but {recipe.algorithm} trains nothing. Try 0")
    elif adapters(policy) is not None:
        message = f"{got} with adapters, which leave routers frozen; expected 0. Try all weights in place of adapters"
        yield Problem(BALANCE, "contradiction", message)
    elif megatron and policy.megatron_cfg.freeze_moe_router:
        message = f"{got} with {MEGATRON}.freeze_moe_router=true; expected 0. Try {MEGATRON}.freeze_moe_router=false"
        yield Problem(BALANCE, "contradiction", message)
    if not megatron and policy.dtensor_cfg.compile:
        message = f"got true with {BALANCE} above 0; expected false, since compiled layers hide what their routers choose"
        yield Problem(f"{DTENSOR}.compile", "contradiction", message)
