"""A recipe from a published file of prime-rl has the values that prime-rl's own classes compute.

golden/prime_rl.json has these values; `golden_prime_rl.py` writes it from a clone.
"""

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
from tests.foreign import golden_prime_rl

GOLDEN = json.loads(golden_prime_rl.FILE.read_text())
UNBOUNDED = 1_000_000
STEPS, RATE = 40, 1e-6


def of_training(given: dict[str, Any]) -> dict[str, Any]:
    optim = given["optim"]
    assert optim["type"] == "adamw"
    return {
        "policy.optimizer.name": "torch.optim.AdamW",
        "policy.optimizer.kwargs": {
            "lr": optim["lr"],
            "weight_decay": optim["weight_decay"],
            "betas": [optim["betas1"], optim["betas2"]],
            "eps": 1e-8,
        },
        "policy.max_grad_norm": optim["max_norm"],
        "policy.scheduler": None,
    }


def expected(golden: dict[str, Any]) -> dict[str, Any]:
    """Return our values of what prime-rl's values mean."""
    if golden["kind"] == "sft":
        data = golden["data"]
        return of_training(golden) | {
            "algorithm": "sft",
            "policy.model_name": golden["model.name"],
            "sft.max_num_steps": golden["max_steps"],
            "sft.seed": data["seed"],
            "data.shuffle": data["shuffle"],
            "data.train.dataset_name": data["name"],
            "policy.train_global_batch_size": data["batch_size"],
            "policy.max_total_sequence_length": data["seq_len"],
            "cluster.train.gpus_per_node": golden["deployment"]["num_train_gpus"],
        }
    loss, training = golden["trainer.loss"], {name: golden[f"trainer.{name}"] for name in ("optim", "scheduler")}
    assert loss["type"] == "default" and training["scheduler"]["type"] == "constant"
    lora = golden["trainer.model.lora"]
    found = of_training(training) | {
        "algorithm": "grpo",
        "policy.model_name": golden["trainer.model.name"],
        "grpo.num_prompts_per_step": golden["orchestrator.batch_size"] // golden["orchestrator.group_size"],
        "grpo.num_generations_per_prompt": golden["orchestrator.group_size"],
        "policy.train_global_batch_size": golden["orchestrator.batch_size"],
        "grpo.max_num_steps": golden["trainer.max_steps"],
        "grpo.normalize_rewards": False,
        "grpo.use_leave_one_out_baseline": False,
        "grpo.async_grpo.max_trajectory_age_steps": golden["orchestrator.max_off_policy_steps"],
        "loss_fn.use_dppo": True,
        "loss_fn.use_generation_logprobs": True,
        "loss_fn.ratio_clip_min": loss["dppo_mask_low"],
        "loss_fn.ratio_clip_max": loss["dppo_mask_high"],
        "loss_fn.drift_penalty": loss["kl_tau"],
        "policy.generation.temperature": golden["orchestrator.train.sampling.temperature"],
        "policy.generation.max_new_tokens": golden["orchestrator.train.sampling.max_completion_tokens"]
        or golden["orchestrator.seq_len"],
        "policy.max_total_sequence_length": golden["orchestrator.seq_len"],
        "policy.sequence_packing.train_mb_tokens": golden["trainer.model.seq_len"],
        "policy.dtensor_cfg.lora_cfg.enabled": lora is not None,
        "policy.generation.vllm_cfg.gpu_memory_utilization": golden["inference.vllm.gpu_memory_utilization"] or 0.9,
        "cluster.train.gpus_per_node": golden["deployment"]["num_train_gpus"],
        "cluster.generate.gpus_per_node": golden["deployment"]["num_infer_gpus"],
        "checkpointing.save_period": golden["trainer.ckpt.interval"] or UNBOUNDED,
    }
    if golden["trainer.ckpt.interval"] is None:
        found.pop("checkpointing.save_period")  # without ckpt, no checkpoint
    if lora:
        found |= {f"policy.dtensor_cfg.lora_cfg.{ours}": lora[theirs] for ours, theirs in (("dim", "rank"), ("alpha", "alpha"))}
    return found


def read(tmp_path: Path, text: str, *arguments: str) -> Recipe:
    path = tmp_path / "rl.toml"
    path.write_text(text)
    return reading.load(str(path), arguments)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_published_file(tmp_path: Path, name: str) -> None:
    recipe = read(tmp_path, GOLDEN[name]["text"])
    meant = expected(GOLDEN[name]["values"])
    assert {key: attrgetter(key)(recipe) for key in meant} == meant


def rate(step: int, kind: str, warm_up: int, decay: int, least: float) -> float:
    """Return the rate of a step by the formulas of src/prime_rl/trainer/scheduler.py."""
    start = least / RATE if least else 1e-8
    if step < warm_up:
        return RATE * (start + (1 - start) * step / warm_up)
    if kind == "cosine":
        return least + (RATE - least) * (1 + math.cos(math.pi * (step - warm_up) / (STEPS - warm_up))) / 2
    since = step - (STEPS - decay)
    return RATE if since < 0 else RATE * (1 + (start - 1) * min(1.0, since / (decay - 1)))


@pytest.mark.parametrize(
    ("kind", "warm_up", "decay", "least"),
    [("linear", 5, 10, 0.0), ("linear", 0, 8, 1e-7), ("cosine", 4, 0, 1e-7), ("cosine", 0, 0, 0.0)],
)
def test_rates(tmp_path: Path, kind: str, warm_up: int, decay: int, least: float) -> None:
    decays = f"decay_steps = {decay}\n" if kind == "linear" else ""
    text = f"max_steps = {STEPS}\n[data]\nname = 'd'\n[model]\nname = 'm'\n[scheduler]\ntype = '{kind}'\n"
    recipe = read(tmp_path, f"{text}warmup_steps = {warm_up}\nmin_lr = {least}\n{decays}")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler = _build_scheduler(optimizer, recipe.policy.scheduler)
    assert scheduler is not None
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([rate(step, kind, warm_up, decay, least) for step in range(STEPS)], rel=1e-5, abs=1e-13)
