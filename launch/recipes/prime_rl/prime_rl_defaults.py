"""prime-rl's defaults of the keys that are translated (packages/prime-rl-configs/src/prime_rl/configs).

`tests/foreign/test_prime_rl_defaults.py` compares the tables with prime-rl, where its package is installed.
"""

from __future__ import annotations

from typing import Any

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts", "fc1_latent_proj"]
LORA_TARGETS += ["fc2_latent_proj"]
LORA: dict[str, Any] = {"rank": 16, "alpha": 32.0, "dropout": 0.0, "target_modules": LORA_TARGETS, "modules_to_save": []}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-6, "weight_decay": 0.01, "max_norm": 1.0, "betas1": 0.9, "betas2": 0.999},
    "muon": {"lr": 1e-6, "weight_decay": 0.01, "max_norm": 1.0, "mu": 0.95, "betas1": 0.9, "betas2": 0.95},
    "sgd": {"lr": 1e-6, "weight_decay": 0.01, "max_norm": 1.0, "nesterov": True, "momentum": 0.9},
    "sign_sgd": {"lr": 1e-6, "weight_decay": 0.01, "max_norm": 1.0},
}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "constant": {},
    "linear": {"warmup_steps": 10, "decay_steps": 10, "min_lr": 0.0},
    "cosine": {"warmup_steps": 10, "min_lr": 0.0},
}
LOSSES: dict[str, dict[str, Any]] = {
    "default": {"dppo_mask_low": 0.2, "dppo_mask_high": 0.2, "adv_tau": 1.0, "kl_tau": 1e-3},
    "ipo": {"ipo_threshold": 0.1, "adv_tau": 1.0, "kl_tau": 1e-3},
    "custom": {},
}
MODEL: dict[str, Any] = {
    "name": "Qwen/Qwen3-0.6B",
    "seq_len": 2048,
    "fsdp_cpu_offload": False,
    "dp_replicate": 1,
    "ep": "auto",
    "cp": 1,
    "cp_style": "ring",
    "optimization_dtype": "float32",
    "freeze_moe_router": False,
    "quantization": None,
    "lora": None,
}
ORCHESTRATOR: dict[str, Any] = {
    "batch_size": None,
    "token_batch_size": None,
    "group_size": 1,
    "seq_len": 2048,
    "max_off_policy_steps": 8,
    "train.filter_zero_advantages": True,
    "train.sampling.temperature": 1.0,
    "train.sampling.max_completion_tokens": None,
}
EVAL: dict[str, Any] = {"interval": 100, "group_size": 1, "num_examples": -1, "skip_first_step": False}
VLLM: dict[str, Any] = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.9, "enforce_eager": False, "quantization": None}
SFT_DATA: dict[str, Any] = {
    "name": "PrimeIntellect/Reverse-Text-SFT",
    "batch_size": 128,
    "seq_len": 128,
    "micro_batch_size": 1,
    "shuffle": True,
    "seed": 0,
}
DEPLOYMENT: dict[str, Any] = {"type": "single_node", "gpus_per_node": 8, "num_train_gpus": 1, "num_infer_gpus": 1}

SHARED: dict[str, tuple[str, ...]] = {  # a key of `rl` -> the keys that have its value unless they are given
    "model.name": ("trainer.model.name", "orchestrator.model.name", "inference.vllm.model"),
    "model.vlm": ("trainer.model.vlm", "orchestrator.model.vlm"),
    "ckpt.output_dir": ("trainer.ckpt.output_dir",),
    "ckpt.interval": ("trainer.ckpt.interval", "orchestrator.ckpt.interval"),
    "ckpt.keep_last": ("trainer.ckpt.keep_last", "orchestrator.ckpt.keep_last"),
    "ckpt.keep_interval": ("trainer.ckpt.keep_interval", "orchestrator.ckpt.keep_interval"),
    "tokenizer.name": ("trainer.tokenizer.name", "orchestrator.tokenizer.name"),
    "tokenizer.chat_template": (
        "trainer.tokenizer.chat_template",
        "orchestrator.tokenizer.chat_template",
        "inference.vllm.chat_template",
    ),
    "monitors.wandb.project": ("trainer.monitors.wandb.project", "orchestrator.monitors.wandb.project"),
    "monitors.wandb.name": ("trainer.monitors.wandb.name", "orchestrator.monitors.wandb.name"),
    "max_steps": ("trainer.max_steps", "orchestrator.max_steps"),
    "seq_len": ("trainer.model.seq_len", "orchestrator.seq_len"),
}
MAY_DIFFER = ("seq_len",)
"""Shared keys whose value a section may change; another value than that of any other shared key is an error of prime-rl."""


def of_rl() -> dict[str, Any]:
    """Return the defaults of the entry point `rl`, but for those that depend on the type of a section."""
    values = {f"trainer.model.{key}": value for key, value in MODEL.items()}
    values |= {f"orchestrator.{key}": value for key, value in ORCHESTRATOR.items()}
    values |= {f"inference.vllm.{key}": value for key, value in VLLM.items()}
    return (
        values
        | {"trainer.max_steps": None, "orchestrator.algo.type": "grpo", "trainer.loss.type": "default"}
        | _common("trainer.")
    )


def of_sft() -> dict[str, Any]:
    """Return the defaults of the entry point `sft`."""
    values = {f"model.{key}": value for key, value in MODEL.items()} | {f"data.{key}": value for key, value in SFT_DATA.items()}
    return values | {"max_steps": None, "data.type": "sft"} | _common("")


NULLABLE: dict[str, Any] = {  # keys whose default is null -> a value of their type
    "orchestrator.batch_size": 1,
    "orchestrator.train.sampling.max_completion_tokens": 1,
    "trainer.max_steps": 1,
    "max_steps": 1,
    "trainer.optim.max_norm": 1.0,
    "optim.max_norm": 1.0,
    "trainer.ckpt.interval": 1,
    "trainer.ckpt.keep_last": 1,
    "ckpt.interval": 1,
    "ckpt.keep_last": 1,
}


def examples(kind: str) -> dict[str, Any]:
    """Return a value of its type for each key of a configuration. kind: rl or sft."""
    section, model = ("trainer.", "trainer.model") if kind == "rl" else ("", "model")
    values = of_rl() if kind == "rl" else of_sft()
    for name, tables in (("optim", OPTIMIZERS), ("scheduler", SCHEDULERS), ("loss", LOSSES)):
        values |= {f"{section}{name}.{key}": value for table in tables.values() for key, value in table.items()}
    values |= {f"{model}.lora.{key}": value for key, value in LORA.items()}
    values |= {f"deployment.{key}": value for key, value in DEPLOYMENT.items()}
    values |= {f"orchestrator.eval.{key}": value for key, value in EVAL.items()}
    return {key: value for key, value in values.items() if key not in NULLABLE}


def _common(section: str) -> dict[str, Any]:
    return {f"{section}optim.type": "adamw", f"{section}scheduler.type": "constant"}
