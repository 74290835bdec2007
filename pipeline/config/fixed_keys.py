"""NeMo-RL's keys of Megatron-Core that are no keys here: those with only one possible value, and those without effect.

A recipe may have such a key, so that a section of NeMo-RL's may be copied: with the one value or null, or with any value if
nothing reads it or FSDP2 trains. The key is then in no resolved recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.config.config_tree import COMMAND_LINE, ConfigMapping, within
from pipeline.config.interpolation import REFERENCE
from pipeline.config.parallelism import MEGATRON, Backend
from pipeline.config.schema_validation import shown
from pipeline.recipe.problems import Problem

_SHARDED = "the optimizer's state is always sharded over the data-parallel ranks and stays on the GPUs"
_REASONS: dict[str, dict[str, Any]] = {
    "interleaved pipeline stages are not supported": {"virtual_pipeline_model_parallel_size": None},
    "other dispatchers do not accept sequences of varying length, or need DeepEP": {"moe_token_dispatcher_type": "alltoall"},
    "a balancing loss would be divided by a different count than the policy's loss": {
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
FIXED = {f"{MEGATRON}.{name}": (value, why) for why, values in _REASONS.items() for name, value in values.items()}
"""Key -> (its one value, which may be that of another key, the reason)."""

IGNORED = {
    f"{MEGATRON}.defer_fp32_logits": "logits are cast to float32 policy.logprob_chunk_size tokens at a time",
    f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather": (
        "a refit reads all gathered weights before the next forward pass starts"
    ),
    f"{MEGATRON}.fp8_cfg": "training in 8 bits is not supported",
    f"{MEGATRON}.optimizer.bf16": "main weights are float32 with any policy.precision",
    f"{MEGATRON}.optimizer.sgd_momentum": "the only optimizer is adam",
    f"{MEGATRON}.optimizer.use_precision_aware_optimizer": (
        "with float32 state it computes the same, and checkpoints need the main weights as they are"
    ),
    f"{MEGATRON}.peft.a2a_experimental": "ranks exchange the dim columns between A and B, never whole activations",
}
"""Key, or section, that nothing reads -> the reason."""


def hint(key: str) -> str | None:
    """Return why a key is no key here; None if this file does not know it."""
    name = key.removeprefix(f"{MEGATRON}.")
    if key in FIXED:
        value, why = FIXED[key]
        return f"Megatron-Core's {name} is fixed here to {shown(value)}, because {why}"
    return next(
        (f"nothing reads Megatron-Core's {name}, because {why}" for known, why in IGNORED.items() if within(key, [known])), None
    )


def problems(tree: ConfigMapping, backend: Backend | None) -> Iterator[Problem]:
    """Yield a problem for each fixed key that has another value, in a tree without interpolations.

    backend: the backend that the recipe names. With FSDP2 only keys on the command line are checked.
    """
    section = tree.find(MEGATRON)
    for key in FIXED if isinstance(section, ConfigMapping) else ():
        node = tree.find(key)
        if node is None or (backend == "dtensor" and node.origin != COMMAND_LINE):
            continue
        fixed, why = FIXED[key]
        if isinstance(fixed, str) and (reference := REFERENCE.fullmatch(fixed)):
            fixed = getattr(tree.find(reference[2]), "value", None)
            if fixed is None:  # its section is null: `megatron_checks.py`
                continue
        value = node.plain() if isinstance(node, ConfigMapping) else node.value
        is_fixed = value == fixed and isinstance(value, bool) == isinstance(fixed, bool)  # False == 0 in Python
        if value not in (None, "None") and not is_fixed:
            yield Problem(
                key,
                "unsupported",
                f"got {shown(value)}; expected {shown(fixed)}: {why}",
                node.origin or "",
            )


def notes(origins: dict[str, str]) -> Iterator[str]:
    """Yield a note for each key that a recipe has and that nothing reads. origins: key -> the file and line that set it."""
    for key, origin in origins.items():
        if key not in FIXED and (why := hint(key)):
            yield f"{origin}: {why}"
