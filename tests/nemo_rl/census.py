"""The features that a recipe of NeMo-RL's uses, read from its resolved tree independently of the translation, to check that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Tree = Mapping[str, Any]


def get(tree: Any, key: str, default: Any = None) -> Any:
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return default
        tree = tree[part]
    return tree


def megatron(tree: Tree, key: str, default: Any = None) -> Any:
    """Return a key of the backend's section, if it trains."""
    return get(tree, f"policy.megatron_cfg.{key}", default) if get(tree, "policy.megatron_cfg.enabled") else default


def dtensor(tree: Tree, key: str, default: Any = None) -> Any:
    return get(tree, f"policy.dtensor_cfg.{key}", default) if get(tree, "policy.dtensor_cfg.enabled") else default


QUESTIONS: dict[str, Callable[[Tree], Any]] = {
    "async": lambda t: get(t, "ppo.async_ppo.enabled") or get(t, "ppo.async_grpo.enabled") or "async_rl" in t,
    "generation backend": lambda t: get(t, "policy.generation.backend", "vllm") != "vllm",
    "FP8 training": lambda t: megatron(t, "fp8_cfg.enabled"),
    "drafting": lambda t: get(t, "policy.generation.vllm_kwargs.speculative_config.method", "ngram") != "ngram",
    "MXFP8 generation": lambda t: (
        "fp8" in str(get(t, "policy.generation.vllm_cfg.precision")) and get(t, "policy.generation.vllm_cfg.is_mx")
    ),
    "FP8 cache": lambda t: str(get(t, "policy.generation.vllm_cfg.kv_cache_dtype")).startswith("fp8"),
    "draft": lambda t: get(t, "policy.draft.enabled"),
    "router replay": lambda t: get(t, "policy.router_replay.enabled"),
    "quantization": lambda t: get(t, "policy.quant_cfg") or get(t, "policy.generation.quant_cfg"),
    "MTP": lambda t: megatron(t, "mtp_num_layers"),
    "Megatron LoRA": lambda t: megatron(t, "peft.enabled"),
    "virtual pipeline": lambda t: megatron(t, "virtual_pipeline_model_parallel_size"),
    "FSDP2 context parallelism": lambda t: dtensor(t, "context_parallel_size", 1) > 1,
    "FSDP2 expert parallelism": lambda t: dtensor(t, "expert_parallel_size", 1) > 1,
    "another optimizer": lambda t: dtensor(t, "enabled") and get(t, "policy.optimizer.name") != "torch.optim.AdamW",
    "NeMo Gym": lambda t: get(t, "env.should_use_nemo_gym") or get(t, "data.default.env_name") == "nemo_gym",
    "custom data loader": lambda t: get(t, "data.use_multiple_dataloader"),
    "several rewards": lambda t: get(t, "grpo.adv_estimator.name") == "gdpo",
    "several teachers": lambda t: get(t, "teachers") or get(t, "on_policy_distillation"),
    "positive NLL": lambda t: get(t, "loss_fn.positive_example_nll_weight"),
    "engine data parallelism": lambda t: (
        get(t, "policy.generation.vllm_cfg.expert_parallel_size", 1)
        > get(t, "policy.generation.vllm_cfg.tensor_parallel_size", 1)
    ),
    "words never sampled": lambda t: get(t, "policy.generation.bad_words"),
}


def features(tree: Tree) -> Iterator[str]:
    """Return the names of the features that a recipe uses."""
    return (name for name, asks in QUESTIONS.items() if asks(tree))
