"""Keys that are no keys here any more, or never were: those with only one possible value, and those without effect.

They are NeMo-RL's keys of Megatron-Core, so that a section of NeMo-RL's may be copied, and keys of older versions. A recipe may
have such a key with its one value or null, or with any value if nothing reads it, or if it is one of Megatron-Core's and FSDP2
trains. The key is then in no resolved recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.algorithms import ALGORITHMS, ONLINE
from pipeline.config.config_tree import COMMAND_LINE, ConfigMapping, within
from pipeline.config.hardware import COMPONENTS
from pipeline.config.interpolation import REFERENCE
from pipeline.config.parallelism import MEGATRON, Backend
from pipeline.config.schema_validation import shown
from pipeline.recipe.problems import Problem

_SHARDED = "the optimizer's state is always sharded over the data-parallel ranks and stays on the GPUs"
UNREAD = object()
HIGHER = ".stop_higher_is_better"
ASYNC_SAVE = f"{MEGATRON}.checkpoint.async_save"
_REASONS: dict[str, dict[str, Any]] = {
    "interleaved pipeline stages are not supported": {"virtual_pipeline_model_parallel_size": None},
    "other dispatchers do not accept sequences of varying length, or need DeepEP": {"moe_token_dispatcher_type": "alltoall"},
    "policy.moe_aux_loss_coeff sets the load-balancing loss, of each sequence, for both backends": {
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    },
    "DeepEP is not supported": {"moe_enable_deepep": False},
    "the load of experts is not logged": {"moe_per_layer_logging": False},
    "multi-token prediction is not trained": {
        "mtp_num_layers": 0,
        "mtp_loss_scaling_factor": 0.0,
        "mtp_use_repeated_layer": False,
        "mtp_detach_heads": False,
    },
    "packed batches vary in shape, and a CUDA graph has a fixed one": {
        "cuda_graph_impl": "none",
        "cuda_graph_modules": [],
        "cuda_graph_warmup_steps": 3,
    },
    "activation_checkpointing=true with recompute_granularity=selective saves memory too": {
        "fine_grained_activation_offloading": False,
        "offload_modules": None,
    },
    "policy.logprob_chunk_size bounds the memory of logits": {
        "use_fused_linear_logprobs": False,
        "fused_linear_logprobs_chunk_size": 256,
    },
    "no supported model family has this activation": {"use_fused_weighted_squared_relu": False},
    "process groups use gloo on CPUs and NCCL on GPUs": {"use_gloo_process_groups": False},
    "training in 8 bits is not supported": {"fp8_cfg.enabled": False},
    "activations between stages have the model's precision": {"pipeline_dtype": "${policy.precision}"},
    "adapters start as the base model": {"peft.lora_B_init_method": "zero"},
    "adapters are in policy.precision, in float32 in the optimizer": {"peft.lora_dtype": "${policy.precision}"},
    "the distributed optimizer has no other": {"optimizer.optimizer": "adam"},
    "float16 trains with FSDP2 alone, see policy.precision": {"optimizer.fp16": False},
    "main weights are float32": {"optimizer.params_dtype": "float32"},
    _SHARDED: {
        "optimizer.use_distributed_optimizer": True,
        "optimizer.optimizer_cpu_offload": False,
        "optimizer.optimizer_offload_fraction": 0.0,
        "optimizer.overlap_cpu_optimizer_d2h_h2d": False,
    },
    "weight decay is constant": {
        "scheduler.start_weight_decay": "${policy.megatron_cfg.optimizer.weight_decay}",
        "scheduler.end_weight_decay": "${policy.megatron_cfg.optimizer.weight_decay}",
        "scheduler.weight_decay_incr_style": "constant",
    },
    "policy.dtensor_cfg.enabled=true shards parameters over data-parallel ranks": {
        "distributed_data_parallel_config.use_custom_fsdp": False,
        "distributed_data_parallel_config.data_parallel_sharding_strategy": "optim_grads_params",
    },
    "a run's checkpoints all have the same structure": {"checkpoint.ckpt_assume_constant_structure": True},
}
_SET_ELSEWHERE: dict[str, dict[str, Any]] = {
    "grpo.normalize_rewards sets it": {"grpo.adv_estimator.normalize_rewards": "${grpo.normalize_rewards}"},
    "grpo.use_leave_one_out_baseline sets it": {
        "grpo.adv_estimator.use_leave_one_out_baseline": "${grpo.use_leave_one_out_baseline}"
    },
    "it is PPO's only estimator of advantages": {"ppo.adv_estimator.name": "gae"},
    "the critic starts as the policy does": {"value.random_init": "${policy.random_init}"},
    "the whole critic is trained": {"value.freeze_parameters": []},
}
_FREE: dict[str, dict[str, Any]] = {
    "lower is better for a metric whose name ends in loss, and higher for all others": {
        f"{name}{HIGHER}": None for name in ALGORITHMS
    },
    "val_period sets when a run validates, and launch/steer.py changes it": {f"{name}.val_start_at": 0 for name in ONLINE},
    "checkpointing.async_save sets it": {ASYNC_SAVE: "${checkpointing.async_save}"},
    "cluster.<component>.env_vars sets variables": {
        f"{MEGATRON}.env_vars": {},
        "policy.generation.vllm_cfg.env_vars": {},
    },
    "every start reads the Hugging Face files, and no job converts them": {f"{MEGATRON}.force_reconvert_from_hf": False},
    "srun_args takes it, as in [--container-env=NAME, --container-writable]": {
        f"cluster.{name}.{key}": value
        for name in COMPONENTS
        for key, value in {"container_env": [], "container_writable": None}.items()
    },
    "plans assume it": {"cluster.network.latency_us": 20.0, "cluster.network.memory_gb_per_s": 1500.0},
    "nodes whose clocks differ by more than this are refused": {"cluster.node_checks.max_clock_skew_s": 5.0},
    "a command that takes longer fails": {"checkpointing.encryption.key_timeout_s": 60.0},
    "logger.monitor.period_s=null takes no samples": {"logger.monitor.enabled": True},
    "a timeline is always recorded": {"logger.timeline_enabled": True},
    "the judge's replies are greedy, and an unreadable reply is asked for twice more, at temperature 0.7": {
        "evaluate.judge.tries": 3,
        "evaluate.judge.temperature": 0.0,
        "evaluate.judge.top_p": 1.0,
    },
}
"""The same for keys that change no number of a training. A run of an older version goes on whatever value it has saved."""
FIXED = {
    **{f"{MEGATRON}.{name}": (value, why) for why, values in _REASONS.items() for name, value in values.items()},
    **{key: (value, why) for why, values in (_SET_ELSEWHERE | _FREE).items() for key, value in values.items()},
}
"""Key -> (its one value, which may be that of another key, the reason)."""

IGNORED = {
    f"{MEGATRON}.defer_fp32_logits": "logits are cast to float32 policy.logprob_chunk_size tokens at a time",
    f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather": (
        "a refit reads all gathered weights before the next forward pass starts"
    ),
    "logger.monitor.flush_s": "samples are written two periods at a time",
    f"{MEGATRON}.fp8_cfg": "training in 8 bits is not supported",
    f"{MEGATRON}.optimizer.bf16": "main weights are float32 with any policy.precision",
    f"{MEGATRON}.optimizer.sgd_momentum": "the only optimizer is adam",
    f"{MEGATRON}.optimizer.use_precision_aware_optimizer": (
        "with float32 state it computes the same, and checkpoints need the main weights as they are"
    ),
    f"{MEGATRON}.peft.a2a_experimental": "ranks exchange the dim columns between A and B, never whole activations",
}
"""Key, or section, that nothing reads -> the reason."""


def _text(value: Any) -> str:
    return "none" if value in ([], {}) else shown(value)


def hint(key: str) -> str | None:
    """Return why a key is no key here; None if this file does not know it."""
    name = f"Megatron-Core's {key.removeprefix(f'{MEGATRON}.')}" if within(key, [MEGATRON]) else key
    if key in FIXED:
        value, why = FIXED[key]
        return f"{name} is fixed here to {_text(value)}, because {why}"
    return next((f"nothing reads {name}, because {why}" for known, why in IGNORED.items() if within(key, [known])), None)


def problems(tree: ConfigMapping, backend: Backend | None) -> Iterator[Problem]:
    """Yield a problem for each fixed key that has another value, in a tree without interpolations.

    backend: the backend that the recipe names. With FSDP2 only keys of Megatron-Core on the command line are checked.
    """
    for key, (fixed, why) in FIXED.items():
        node = tree.find(key)
        of_megatron = within(key, [MEGATRON]) and key != ASYNC_SAVE  # which counted for both backends
        if node is None or (backend == "dtensor" and of_megatron and node.origin != COMMAND_LINE):
            continue
        fixed = _applying(tree, key, fixed)
        if fixed is UNREAD:
            continue
        value = node.plain() if isinstance(node, ConfigMapping) else node.value
        is_fixed = value == fixed and isinstance(value, bool) == isinstance(fixed, bool)  # False == 0 in Python
        if value not in (None, "None") and not is_fixed:
            yield Problem(key, "unsupported", f"got {shown(value)}; expected {_text(fixed)}: {why}", node.origin or "")


def _applying(tree: ConfigMapping, key: str, fixed: Any) -> Any:
    """Return the value that applies in place of a fixed key; UNREAD if nothing reads it, or the section that has it is null."""
    if key.endswith(HIGHER):
        metric = getattr(tree.find(f"{key.removesuffix(HIGHER)}.stop_at_validation_metric"), "value", None)
        return UNREAD if metric is None else not str(metric).endswith("loss")
    if isinstance(fixed, str) and (reference := REFERENCE.fullmatch(fixed)):
        value = getattr(tree.find(reference[2]), "value", None)
        return UNREAD if value is None else value
    return fixed


def leave_out(saved: ConfigMapping) -> None:
    """Drop the keys that an older version wrote into a run's recipe and that change none of the run's numbers.

    Variables of a backend become those of its component. A direction of early stop that no longer applies stays, to be refused.
    """
    for section, components in {MEGATRON: ("train", "reward"), "policy.generation.vllm_cfg": ("generate",)}.items():
        variables = saved.find(f"{section}.env_vars")
        for name, node in variables.children.items() if isinstance(variables, ConfigMapping) else ():
            for component in components:
                if saved.find(f"cluster.{component}") and not saved.find(f"cluster.{component}.env_vars.{name}"):
                    saved.set(f"cluster.{component}.env_vars.{name}", node)
    for name in ("normalize_rewards", "use_leave_one_out_baseline"):
        if node := saved.find(f"grpo.adv_estimator.{name}"):  # the value that counted
            saved.set(f"grpo.{name}", node)
    for key in (key for keys in _FREE.values() for key in keys):
        around = key.rpartition(".")[0]
        higher = _applying(saved, key, None) if key.endswith(HIGHER) else UNREAD
        if higher is not UNREAD and getattr(saved.find(key), "value", None) is (not higher):
            continue
        saved.drop(key)
        if isinstance(section := saved.find(around), ConfigMapping) and not section.children:
            saved.drop(around)


def notes(origins: dict[str, str]) -> Iterator[str]:
    """Yield a note for each key that a recipe has and that nothing reads. origins: key -> the file and line that set it."""
    for key, origin in origins.items():
        if key not in FIXED and (why := hint(key)):
            yield f"{origin}: {why}"
