"""`policy.megatron_cfg`, where Megatron-Core trains."""

from __future__ import annotations

from launch.nemo_rl import facts
from launch.nemo_rl.algorithm import epochs, most
from launch.nemo_rl.cluster import environment_variables
from launch.nemo_rl.features import Feature
from launch.nemo_rl.ledger import Ledger
from launch.nemo_rl.rules import Changed, Only, Switch, apply, ignored, same, under
from pipeline.algorithms import OFFLINE
from pipeline.algorithms.sections import OfflineConfig, OnlineConfig, bound

KEY = "policy.megatron_cfg"

MEGATRON = under(
    "megatron_cfg",
    (
        same(
            "force_reconvert_from_hf",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "sequence_parallel",
            "activation_checkpointing",
            "empty_unused_memory_level",
            "defer_fp32_logits",
            "pipeline_dtype",
            "freeze_moe_router",
            "moe_router_dtype",
            "moe_shared_expert_overlap",
            "gradient_accumulation_fusion",
            "attention_backend",
            "checkpoint.async_save",
            "model_overrides.*",
            "distributed_data_parallel_config.grad_reduce_in_fp32",
            "distributed_data_parallel_config.overlap_grad_reduce",
            "distributed_data_parallel_config.overlap_param_gather",
            "distributed_data_parallel_config.use_custom_fsdp",
        ),
        Switch("fp8_cfg", Feature.FP8_TRAINING, "false trains in policy.precision"),
        Switch("peft", Feature.MEGATRON_LORA, "FSDP2 has adapters: policy.dtensor_cfg.lora_cfg"),
        Only(("mtp_num_layers",), (0, None), Feature.MTP, "0"),
        Only(("virtual_pipeline_model_parallel_size",), (1, None), Feature.VIRTUAL_PIPELINE, "null"),
        Changed(
            ("moe_token_dispatcher_type", "moe_enable_deepep"),
            ("alltoall", "allgather", False, None),
            "tokens travel to their experts by NCCL's all-to-all: the same numbers, without DeepEP's speed",
        ),
        Only(("cuda_graph_impl",), ("none", None), Feature.CUDA_GRAPHS, "none"),
        Only(("fine_grained_activation_offloading",), (False, None), Feature.OFFLOADING, "activation_checkpointing=true"),
        Only(("freeze_config.*", "freeze_vision_*", "freeze_sound_*"), (False, None), Feature.FREEZING, "false"),
        Changed(("transformer_impl",), ("transformer_engine", None), "what trains is Megatron-Core's usual modules"),
        Changed(("moe_per_layer_logging", "track_moe_metrics"), (False, None), "the experts' load is not logged"),
        ignored("mtp_*", "cuda_graph_*", "offload_modules", "moe_flex_*", "*hybridep_*"),  # of those above
        ignored(
            "inference_*",
            "moe_pad_experts_for_cuda_graph_inference",
            "clear_memory_caches_before_refit",
            "use_gloo_process_groups",
        ),
        ignored("use_fused_weighted_squared_relu", "fused_linear_logprobs_chunk_size"),
        # NeMo-RL does not read these, or sets them itself.
        ignored("converter_type", "moe_router_enable_expert_bias", "train_iters", "calculate_per_token_loss"),
        ignored("scale_loss_by_dp_cp_size", "do_not_average_loss", "cp_normalize"),
        ignored("checkpoint.*"),
        ignored(
            "distributed_data_parallel_config.average_in_collective",  # nor this
            "distributed_data_parallel_config.data_parallel_sharding_strategy",  # of use_custom_fsdp
        ),
    ),
)

OPTIMIZER = under(
    "megatron_cfg.optimizer",
    (
        Only(("optimizer",), ("adam",), Feature.OPTIMIZER, "adam"),
        same("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad"),
        same("use_precision_aware_optimizer"),
        Only(("fp16",), (False, None), Feature.OPTIMIZER, "false: policy.precision=bfloat16 needs no loss scaling"),
        Only(("optimizer_cpu_offload",), (False, None), Feature.OFFLOADING, "false"),
        Changed(("bf16",), (True, None), "main weights are float32 in any case"),
        Changed(("use_distributed_optimizer",), (True, None), "the optimizer's state is cut over the data ranks: less memory"),
        ignored("params_dtype", "sgd_momentum", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"),
    ),
)

SCHEDULER = under(
    "megatron_cfg.scheduler",
    (
        same("lr_decay_style", "lr_warmup_iters", "lr_warmup_init", "weight_decay_incr_style"),
        ignored("override_opt_param_scheduler"),
    ),
)

BALANCE = ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_router_bias_update_rate")  # of a mixture of experts

TAKEN = tuple(
    f"megatron_cfg.{key}"
    for key in (
        "enabled",
        "env_vars.*",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "moe_permute_fusion",
        "moe_grouped_gemm",
        "apply_rope_fusion",
        "bias_activation_fusion",
        "use_fused_linear_logprobs",
        *BALANCE,
        "scheduler.lr_decay_iters",
        "scheduler.start_weight_decay",
        "scheduler.end_weight_decay",
    )
)

# Kernels that theirs has always installed. Ours takes them where they are (null), so that true says nothing.
FUSIONS = ("moe_permute_fusion", "moe_grouped_gemm", "apply_rope_fusion", "bias_activation_fusion")


def translate(ledger: Ledger, algorithm: str) -> None:
    environment_variables(ledger, f"{KEY}.env_vars", f"{KEY}.env_vars")
    for fusion in FUSIONS:
        if ledger.take(f"{KEY}.{fusion}") is False:
            ledger.put(f"{KEY}.{fusion}", False, f"{KEY}.{fusion}")
    _balance(ledger)
    _recompute(ledger)
    _dispatcher(ledger)
    _fused_logprobs(ledger)
    _schedule(ledger, algorithm)
    for section in ("model_overrides", "attention_backend"):
        if ledger.get(f"{KEY}.{section}") is None:
            ledger.take(f"{KEY}.{section}")
    apply(ledger, under("policy", (*OPTIMIZER, *SCHEDULER, *MEGATRON)))


def _balance(ledger: Ledger) -> None:
    """Some recipes of dense models set these as well, where they say nothing."""
    dense = facts.has_experts(ledger.get("policy.model_name")) is False
    for name in BALANCE:
        if not dense:
            ledger.copy(f"{KEY}.{name}")
        ledger.take(f"{KEY}.{name}")


def _recompute(ledger: Ledger) -> None:
    """While nothing is recomputed, what would be says nothing."""
    recomputes = ledger.get(f"{KEY}.activation_checkpointing") is True
    for name in ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"):
        value = ledger.take(f"{KEY}.{name}")
        if recomputes and value is not None:
            ledger.put(f"{KEY}.{name}", value, f"{KEY}.{name}")


def _dispatcher(ledger: Ledger) -> None:
    if ledger.get(f"{KEY}.moe_token_dispatcher_type") == "allgather" and ledger.get(f"{KEY}.expert_model_parallel_size", 1) > 1:
        ledger.change(f"{KEY}.moe_token_dispatcher_type=allgather", "tokens are sent to their experts, with the same numbers")


def _fused_logprobs(ledger: Ledger) -> None:
    key, size = f"{KEY}.use_fused_linear_logprobs", f"{KEY}.fused_linear_logprobs_chunk_size"
    if ledger.take(key) is True:
        chunk = ledger.get(size, 256)
        ledger.put("policy.logprob_chunk_size", chunk, size if ledger.has(size) else key)
        ledger.change(f"{key}=true", f"policy.logprob_chunk_size={chunk} bounds the logits that exist at once")


def _schedule(ledger: Ledger, algorithm: str) -> None:
    """Theirs advances by train_global_batch_size samples per train() call and counts an iteration as as many samples, so its
    iterations are steps of the algorithm, as ours (DPO and RM double both sides)."""
    optimizer, scheduler = f"{KEY}.optimizer", f"{KEY}.scheduler"
    if ledger.get(optimizer) is None or ledger.get(scheduler) is None:
        absent = optimizer if ledger.get(optimizer) is None else scheduler
        ledger.problem(absent, "Megatron-Core trains, and it is not given; NeMo-RL has no default for it")
        ledger.take(optimizer)
        ledger.take(scheduler)
        return
    start, end = (ledger.take(f"{scheduler}.{which}_weight_decay") for which in ("start", "end"))
    if start != end:
        ledger.put(f"{scheduler}.start_weight_decay", start, f"{scheduler}.start_weight_decay")
        ledger.put(f"{scheduler}.end_weight_decay", end, f"{scheduler}.end_weight_decay")
    elif end is not None and end != ledger.get(f"{optimizer}.weight_decay"):
        ledger.put(f"{optimizer}.weight_decay", end, f"{scheduler}.end_weight_decay")
        given = ledger.take(f"{optimizer}.weight_decay")
        ledger.change(f"{optimizer}.weight_decay={given}", f"the schedule's {end} is what Megatron-Core takes")
    for key, value in {f"{optimizer}.clip_grad": 1.0, f"{scheduler}.lr_decay_style": "linear"}.items():  # Megatron-Core's
        if not ledger.has(key):
            ledger.put(key, value, key)
    decay = ledger.take(f"{scheduler}.lr_decay_iters")
    if ledger.get(f"{scheduler}.lr_decay_style", "linear") == "constant":
        warm_up = warm_up_iters(ledger, scheduler, decay, algorithm)
        if warm_up != ledger.get(f"{scheduler}.lr_warmup_iters", 0):
            ledger.take(f"{scheduler}.lr_warmup_iters")
            ledger.put(f"{scheduler}.lr_warmup_iters", warm_up, f"{scheduler}.lr_decay_iters")
        return
    if decay is None:
        _decay_with_the_run(ledger, algorithm, f"{scheduler}.lr_decay_iters")
    else:
        ledger.put(f"{scheduler}.lr_decay_iters", decay, f"{scheduler}.lr_decay_iters")


def warm_up_iters(ledger: Ledger, scheduler: str, decay: int | None, algorithm: str) -> int:
    """lr_warmup_iters of a rate that is constant afterwards. scheduler: the key of the section; decay: its lr_decay_iters.

    Theirs cuts a warm-up that is not shorter than the decay to the decay less one sample: ConfigContainer of Megatron-Bridge,
    _calculate_scheduler_steps.
    """
    key = f"{scheduler}.lr_warmup_iters"
    warm_up = ledger.get(key) or 0
    end, source = (decay, f"{scheduler}.lr_decay_iters") if decay else (_run(ledger, algorithm), f"{algorithm}.max_num_steps")
    if end is None or warm_up < end:
        return warm_up
    if warm_up > end:
        ledger.change(f"{key}={warm_up}", f"{end}, since {source}={end} cuts the warm-up there too")
    return end


def _run(ledger: Ledger, algorithm: str) -> int | None:
    """How often a run advances the schedules, which theirs sets as train_iters; None: max_num_steps does not bound it.

    Theirs takes the steps or what the epochs of data have, whichever are fewer; how long the data are is not known here.
    """
    steps = most(ledger, algorithm, "max_num_steps") or (OfflineConfig if algorithm in OFFLINE else OnlineConfig).max_num_steps
    return None if bound(steps) is None else steps * epochs(ledger, algorithm)


def _decay_with_the_run(ledger: Ledger, algorithm: str, decay: str) -> None:
    key, end = f"{algorithm}.max_num_steps", _run(ledger, algorithm)
    if end is None:
        ledger.problem(decay, f"null, and {key} does not say at which step the decay ends; give one of them")
    else:
        ledger.put(decay, end, key)
        ledger.change(f"{decay}=null", f"the decay ends with the run, {key}: {end}, whatever the number of epochs of data")
