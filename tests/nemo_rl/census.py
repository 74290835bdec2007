"""The features that a recipe of NeMo-RL's uses, read from its resolved tree independently of the translation, to check that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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


def _same(name: str) -> tuple[str, Callable[[Tree], Any]]:
    return f"policy.dtensor_cfg.{name}", lambda tree: dtensor(tree, name)


ENGINES = ("vllm", "sglang", "trtllm", "megatron", "dynamo")

QUESTIONS: dict[str, Callable[[Tree], Any]] = {
    "generation backend": lambda t: get(t, "policy.generation.backend", "vllm") not in ENGINES,
    "FP8 training": lambda t: megatron(t, "fp8_cfg.enabled"),
    "MXFP8 generation": lambda t: (
        "fp8" in str(get(t, "policy.generation.vllm_cfg.precision")) and get(t, "policy.generation.vllm_cfg.is_mx")
    ),
    "FP8 cache": lambda t: str(get(t, "policy.generation.vllm_cfg.kv_cache_dtype")).startswith("fp8"),
    "draft": lambda t: get(t, "policy.draft.enabled"),
    "quantization": lambda t: get(t, "policy.quant_cfg") or get(t, "policy.generation.quant_cfg"),
    "MTP": lambda t: megatron(t, "mtp_num_layers"),
    "virtual pipeline": lambda t: megatron(t, "virtual_pipeline_model_parallel_size"),
    "another optimizer": lambda t: dtensor(t, "enabled") and "Adam" not in str(get(t, "policy.optimizer.name")),
    "frozen language model": lambda t: (
        megatron(t, "freeze_config.freeze_language_model") or dtensor(t, "automodel_kwargs.freeze_config.freeze_language_model")
    ),
    "NeMo Gym": lambda t: get(t, "env.should_use_nemo_gym") or get(t, "data.default.env_name") == "nemo_gym",
    "custom data loader": lambda t: get(t, "data.use_multiple_dataloader"),
    "teachers with other tokenizers": lambda t: get(t, "teachers"),
    "positive NLL": lambda t: get(t, "loss_fn.positive_example_nll_weight"),
    "words never sampled": lambda t: get(t, "policy.generation.bad_words"),
}
"""Features that we do not have. No recipe with one may plan."""

TRANSLATED: dict[str, tuple[Callable[[Tree], Any], str, Any]] = {
    "router replay": (
        lambda t: get(t, "policy.router_replay.enabled"),
        "",
        ("policy.router_replay.enabled", lambda t: True),
    ),
    "load balancing": (
        lambda t: (
            megatron(t, "expert_model_parallel_size", 1) > 1 and megatron(t, "moe_router_load_balancing_type", "none") != "none"
        ),
        "policy.megatron_cfg.moe_router_load_balancing_type",
        None,
    ),
    "async PPO": (lambda t: get(t, "ppo.async_ppo.enabled"), "", ("ppo.async_ppo.enabled", lambda t: True)),
    "single controller": (lambda t: "async_rl" in t, "async_rl.sampler", None),
    "several teachers": (
        lambda t: get(t, "grpo.adv_estimator.name") == "opd",
        "",
        (
            "on_policy_distillation.teachers",
            lambda t: {
                name: {"model_name": model}
                for name, model in get(t, "on_policy_distillation.teacher_model_by_agent_name", {}).items()
            },
        ),
    ),
    "several rewards": (
        lambda t: get(t, "grpo.adv_estimator.name") == "gdpo",
        "",
        ("grpo.adv_estimator.name", lambda t: "gdpo"),
    ),
    "another engine": (lambda t: get(t, "policy.generation.backend", "vllm") != "vllm", "policy.generation.backend", None),
    "drafting": (
        lambda t: (
            get(t, "policy.generation.backend") == "vllm"
            and get(t, "policy.generation.vllm_kwargs.speculative_config.method", "ngram") != "ngram"
        ),
        "policy.generation.vllm_kwargs.speculative_config",
        None,
    ),
    "experts over several engines": (
        lambda t: (
            get(t, "policy.generation.vllm_cfg.expert_parallel_size", 1)
            > get(t, "policy.generation.vllm_cfg.tensor_parallel_size", 1)
        ),
        "policy.generation.vllm_cfg.expert_parallel_size",
        None,
    ),
    "FusedAdam": (
        lambda t: dtensor(t, "enabled") and "FusedAdam" in str(get(t, "policy.optimizer.name")),
        "",
        ("policy.optimizer.name", lambda t: "torch.optim.AdamW"),
    ),
    "frozen towers": (
        lambda t: dtensor(t, "automodel_kwargs.freeze_config.freeze_vision_tower"),
        "policy.dtensor_cfg.automodel_kwargs.freeze_config",
        None,
    ),
    "Megatron LoRA": (lambda t: megatron(t, "peft.enabled"), "", ("policy.megatron_cfg.peft.enabled", lambda t: True)),
    "FSDP2 context parallelism": (lambda t: dtensor(t, "context_parallel_size", 1) > 1, "", _same("context_parallel_size")),
    "FSDP2 expert parallelism": (lambda t: dtensor(t, "expert_parallel_size", 1) > 1, "", _same("expert_parallel_size")),
}
"""Features that become something: whether a recipe asks for one, the beginning of the note about it or "", and (a key of ours,
its value from their tree) or None."""


def features(tree: Tree) -> Iterator[str]:
    """Return the names of the features that a recipe uses and that we do not have."""
    return (name for name, asks in QUESTIONS.items() if asks(tree))


def dropped(tree: Tree, layer: Tree, notes: Iterable[str]) -> Iterator[str]:
    """Yield the names of the features that the translation of a recipe neither keeps nor notes. layer: in our keys."""
    notes = tuple(notes)
    for name, (asks, note, kept) in TRANSLATED.items():
        if not asks(tree):
            continue
        noted = note and any(one.startswith(note) for one in notes)
        if not noted and (kept is None or get(layer, kept[0]) != kept[1](tree)):
            yield name
