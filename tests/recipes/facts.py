"""The values that affect the result of a recipe, by key, to compare two recipes independently of their placement.

A rate is a rate in torch's words and in Megatron-Core's: `policy.rates` are its shares of the peak at some steps, and
`policy.optimizer` is the rest. Left out: layouts, batches of tokens, memory, checkpoints, logs.
"""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from launch.recipes.nemo_rl.megatron_keys import has_experts
from pipeline.algorithms import ONLINE
from pipeline.config import OptimizerConfig, PolicyConfig, Recipe, runs_ahead, section, uses_megatron
from pipeline.config.megatron import MegatronOptimizerConfig, MegatronSchedulerConfig
from pipeline.config.policy import ValueConfig
from pipeline.recipe.values import leaves
from pipeline.train.optimizer import LRSchedule

MODEL = (
    "model_name",
    "random_init",
    "tokenizer.*",
    "hf_config_overrides*",
    "train_global_batch_size",
    "max_total_sequence_length",
    "precision",
    "max_grad_norm",
)
POLICY = (
    *MODEL,
    "dtensor_cfg.lora_cfg.*",
    *(f"generation.{key}" for key in ("max_new_tokens", "temperature", "top_?", "val_*", "stop_token_ids", "stop_strings")),
    "generation.vllm_cfg.precision",
)
MIXTURE = ("freeze_moe_router", "moe_router_*", "moe_aux_loss_coeff", "apply_rope_fusion", "mtp_num_layers")
DISTILLS = ("kl_type", "mixed_kl_weight", "zero_outside_topk")
NOT_OF_DATA = ("data.*.weight", "data.*.margin_key", "data.datasets", "data.validations")
STEPS = (0, 1, 2, 3, 5, 9, 10, 12, 13, 19, 20, 30, 49, 50, 100, 210, 211, 230)


def facts(recipe: Recipe) -> dict[str, Any]:
    """Return dotted key -> value."""
    held = {"algorithm": recipe.algorithm}
    held |= {key: value for key, value in leaves(dataclasses.asdict(recipe)) if _is_held(recipe, key)}
    if recipe.algorithm in ONLINE:
        own = section(recipe)
        samples = own.num_prompts_per_step * own.num_generations_per_prompt
        held["updates_per_step"] = samples // recipe.policy.train_global_batch_size
    for name, environment in recipe.env.items():
        if environment.kind == "math":
            held[f"env.{name}.kwargs.math_verify_impl"] = environment.kwargs.get("math_verify_impl", "hf_math_verify")
    for key in held:
        if key.endswith("prompt_file") and held[key]:
            held[key] = Path(held[key]).name
    held |= _optimizer("policy", recipe.policy)
    if recipe.algorithm == "ppo":
        held |= _optimizer("value", recipe.value)
    if uses_megatron(recipe.policy) and recipe.policy.megatron_cfg.optimizer:
        held["policy.max_grad_norm"] = recipe.policy.megatron_cfg.optimizer.clip_grad
    return held


def _is_held(recipe: Recipe, key: str) -> bool:
    section, _, below = key.partition(".")
    policy_gradient = recipe.algorithm in ("grpo", "ppo")
    match section:
        case recipe.algorithm:
            held = "max_generation_failures" not in below
            return held and (runs_ahead(recipe) if below.startswith("async_grpo.") else True)
        case "loss_fn":
            return policy_gradient != (below in DISTILLS) if recipe.algorithm in ("grpo", "ppo", "distillation") else False
        case "value_loss_fn":
            return recipe.algorithm == "ppo"
        case "policy":
            if below.startswith("megatron_cfg."):
                wanted, below = MIXTURE if has_experts(recipe.policy.model_name) else (), below.removeprefix("megatron_cfg.")
            else:
                wanted = POLICY
            return any(fnmatchcase(below, pattern) for pattern in wanted)
        case "value":
            return recipe.algorithm == "ppo" and any(fnmatchcase(below, pattern) for pattern in MODEL)
        case "teacher":
            return recipe.algorithm == "distillation" and below in ("model_name", "precision")
        case "data":
            return not any(fnmatchcase(key, pattern) for pattern in NOT_OF_DATA)
        case "env":
            return key.endswith((".kind", ".math_verify_impl"))
    return False


def _optimizer(key: str, model: PolicyConfig | ValueConfig) -> dict[str, Any]:
    own = model.megatron_cfg.optimizer if isinstance(model, PolicyConfig) and uses_megatron(model) else None
    if own is not None:
        schedule = model.megatron_cfg.scheduler or MegatronSchedulerConfig()
        kwargs = {
            "lr": own.lr,
            "betas": [own.adam_beta1, own.adam_beta2],
            "eps": own.adam_eps,
            "weight_decay": own.weight_decay,
        }
        rates = _megatrons(own, schedule)
    else:
        kwargs = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, **model.optimizer.kwargs}
        rates = _torchs(model.optimizer, model.scheduler)
    held = {f"{key}.optimizer.{name}": kwargs[name] for name in ("lr", "betas", "eps", "weight_decay")}
    return {**held, f"{key}.rates": [round(rate / kwargs["lr"], 6) for rate in rates]}


def _torchs(optimizer: OptimizerConfig, scheduler: Any) -> list[float]:
    """Return the rates of the steps in STEPS."""
    schedule = LRSchedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=optimizer.kwargs["lr"]), scheduler)
    rates = []
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            rates.append(schedule.lr)
        schedule.step()
    return rates


def _megatrons(optimizer: MegatronOptimizerConfig, scheduler: MegatronSchedulerConfig) -> list[float]:
    """tests/train/test_schedules.py holds Megatron-Core's own schedule to the same."""
    assert scheduler.lr_decay_style == "constant"
    start, warm_up = scheduler.lr_warmup_init, max(1, scheduler.lr_warmup_iters)
    return [
        start + (optimizer.lr - start) * min(1.0, (step if scheduler.lr_warmup_iters else warm_up) / warm_up) for step in STEPS
    ]
