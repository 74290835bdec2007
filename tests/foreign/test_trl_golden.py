"""A recipe from a published command of TRL has the values that TRL's own parser and trainers compute."""

from __future__ import annotations

import json
import math
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.recipes import reading
from pipeline.config import Recipe
from pipeline.train.optimizer import _build_scheduler
from tests.foreign import golden_trl

NUMBERS = json.loads(golden_trl.FILE.read_text())
STEPS = 40


def expected(trl: dict[str, Any], processes: int) -> dict[str, Any]:
    """Return our values of what TRL's values mean."""
    update = trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"] * processes
    found = {
        "policy.model_name": trl["model_name_or_path"],
        "policy.train_global_batch_size": update,
        "policy.train_micro_batch_size": trl["per_device_train_batch_size"],
        "policy.max_grad_norm": trl["max_grad_norm"],
        "policy.precision": "bfloat16",
        "policy.optimizer.kwargs": {
            "lr": trl["learning_rate"],
            "weight_decay": trl["weight_decay"],
            "betas": [trl["adam_beta1"], trl["adam_beta2"]],
            "eps": trl["adam_epsilon"],
        },
        "policy.dtensor_cfg.activation_checkpointing": trl["gradient_checkpointing"],
        "policy.dtensor_cfg.lora_cfg.enabled": trl["use_peft"],
        "cluster.train.gpus_per_node": processes,
    }
    if trl["use_peft"]:
        found |= {
            f"policy.dtensor_cfg.lora_cfg.{ours}": trl[theirs] for ours, theirs in (("dim", "lora_r"), ("alpha", "lora_alpha"))
        }
    if trl["trainer"] in ("grpo", "rloo"):
        size = max(trl["generation_batch_size"], update)
        found |= {
            "algorithm": "grpo",
            "grpo.seed": trl["seed"],
            "grpo.num_prompts_per_step": size // trl["num_generations"],
            "grpo.num_generations_per_prompt": trl["num_generations"],
            "grpo.max_num_epochs": math.ceil(trl["num_train_epochs"]),
            "grpo.overlong_filtering": trl["mask_truncated_completions"],
            "policy.generation.max_new_tokens": trl["max_completion_length"],
            "policy.generation.temperature": trl["temperature"],
            "policy.generation.top_p": trl["top_p"],
            "policy.generation.top_k": trl["top_k"] or None,
            "loss_fn.reference_policy_kl_penalty": trl["beta"],
            "grpo.use_leave_one_out_baseline": trl["trainer"] == "rloo",
            "loss_fn.disable_ppo_ratio": trl["trainer"] == "rloo",
        }
    if trl["trainer"] == "grpo":
        found |= {
            "grpo.normalize_rewards": trl["scale_rewards"] == "group",
            "loss_fn.ratio_clip_min": trl["epsilon"],
            "loss_fn.ratio_clip_max": trl["epsilon"] if trl["epsilon_high"] is None else trl["epsilon_high"],
            "loss_fn.token_level_loss": trl["loss_type"] != "grpo",
            "loss_fn.use_importance_sampling_correction": trl["use_vllm"] and trl["vllm_importance_sampling_correction"],
        }
    if trl["trainer"] in ("sft", "dpo", "reward"):
        section = {"reward": "rm"}.get(trl["trainer"], trl["trainer"])
        found |= {
            "algorithm": section,
            f"{section}.seed": trl["seed"],
            f"{section}.max_num_epochs": math.ceil(trl["num_train_epochs"]),
            "policy.max_total_sequence_length": trl["max_length"],
        }
    if trl["trainer"] == "dpo":
        found |= {"dpo.reference_policy_kl_penalty": trl["beta"], "dpo.label_smoothing": trl["label_smoothing"]}
        found |= {"dpo.preference_loss": trl["loss_type"][0], "dpo.sft_loss_weight": 0.0}
    return found


def read(tmp_path: Path, command: str, *arguments: str) -> Recipe:
    path = tmp_path / "run.sh"
    path.write_text(command)
    return reading.load(str(path), arguments)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_published_command(tmp_path: Path, name: str) -> None:
    numbers = NUMBERS[name]
    arguments = ["--reward_funcs", "accuracy_reward"] if numbers["values"].get("reward_funcs") is None else []
    arguments = arguments if numbers["values"]["trainer"] in ("grpo", "rloo") else []
    recipe = read(tmp_path, numbers["command"], *arguments)
    meant = expected(numbers["values"], numbers["processes"])
    assert {key: attrgetter(key)(recipe) for key in meant} == meant


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_trls(name: str) -> None:
    trl = pytest.importorskip("trl")
    if not trl.__version__.startswith("1.16"):
        pytest.skip("the numbers are those of TRL 1.16")
    theirs = golden_trl.of_trl(NUMBERS[name]["command"], NUMBERS[name]["processes"])
    assert {field: theirs[field] for field in NUMBERS[name]["values"]} == NUMBERS[name]["values"]


@pytest.mark.parametrize(
    ("style", "kwargs", "warm_up"),
    [
        ("linear", {}, "0"),
        ("linear", {}, "7"),
        ("cosine", {}, "0.1"),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}, "3"),
        ("constant", {}, "0"),
        ("constant_with_warmup", {}, "5"),
        ("polynomial", {"power": 2.0, "lr_end": 0.0}, "4"),
        ("warmup_stable_decay", {"num_decay_steps": 10}, "5"),
        ("warmup_stable_decay", {"num_decay_steps": 10, "decay_type": "linear", "min_lr_ratio": 0.1}, "0"),
    ],
)
def test_rates_are_those_of_transformers(tmp_path: Path, style: str, kwargs: dict[str, Any], warm_up: str) -> None:
    from transformers import TrainingArguments, get_scheduler

    flags = f"--lr_scheduler_type {style} --warmup_steps {warm_up} --max_steps {STEPS}"
    flags += f" --lr_scheduler_kwargs '{json.dumps(kwargs)}'" if kwargs else ""
    recipe = read(tmp_path, f"trl sft --model_name_or_path m --dataset_name d {flags}\n")
    number = TrainingArguments(str(tmp_path), warmup_steps=float(warm_up), use_cpu=True).get_warmup_steps(STEPS)
    rates = []
    for build in (
        lambda optimizer: get_scheduler(style, optimizer, number, STEPS, kwargs),
        lambda optimizer: _build_scheduler(optimizer, recipe.policy.scheduler),
    ):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-5)
        scheduler = build(optimizer)
        rates.append([])
        for _ in range(STEPS):
            rates[-1].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    assert len(set(rates[0])) > 1 or style == "constant"
    assert rates[1] == pytest.approx(rates[0], rel=1e-6, abs=1e-15)
