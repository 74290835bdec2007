"""Translate `policy.megatron_cfg` of a recipe that Megatron-Core trains."""

from __future__ import annotations

from launch.recipes.model_files import described
from launch.recipes.nemo_rl.algorithm_keys import epochs, max_num_steps
from launch.recipes.nemo_rl.cluster_keys import environment_variables
from launch.recipes.nemo_rl.logger_keys import TEXT
from launch.recipes.translation.balancing_losses import ADAPTED, from_megatron
from launch.recipes.translation.rules import Changed, Done, Ignored, Only, Same, Switch, apply, if_set, under
from launch.recipes.translation.translator import ABSENT, Translator
from pipeline.algorithms import OFFLINE
from pipeline.algorithms.sections import OfflineConfig, OnlineConfig, bound
from pipeline.models.backend_support import expert_count
from pipeline.train.adapters import modules

KEY = "policy.megatron_cfg"
OPTIMIZER, SCHEDULER = f"{KEY}.optimizer", f"{KEY}.scheduler"
BIAS = f"{KEY}.moe_router_bias_update_rate"
LORA_OPTION = "this option of LoRA"
FROZEN = "freezing the language model, which leaves nothing to train without images, sound or video"

MEGATRON = under(
    "megatron_cfg",
    (
        Same("tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size"),
        Ignored("force_reconvert_from_hf", "every start reads the Hugging Face files, and no job converts them"),
        Same("num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage sequence_parallel"),
        Same("expert_model_parallel_size expert_tensor_parallel_size activation_checkpointing empty_unused_memory_level"),
        Same("defer_fp32_logits pipeline_dtype freeze_moe_router moe_router_dtype moe_shared_expert_overlap"),
        Same("gradient_accumulation_fusion"),
        Same("checkpoint.async_save", ours="checkpointing.async_save"),
        Same("attention_backend model_overrides", if_set),
        Same("model_overrides.*"),
        Same("distributed_data_parallel_config.grad_reduce_in_fp32 distributed_data_parallel_config.overlap_grad_reduce"),
        Same("distributed_data_parallel_config.overlap_param_gather distributed_data_parallel_config.use_custom_fsdp"),
        # NeMo-RL always has these kernels installed. Ours uses them if they are installed (null), so true needs no key.
        Same(
            "moe_permute_fusion moe_grouped_gemm apply_rope_fusion bias_activation_fusion",
            lambda on: False if on is False else ABSENT,
        ),
        Same("recompute_granularity recompute_method recompute_num_layers recompute_modules", if_set),
        Switch("fp8_cfg.*", "training in 8 bits", "false, which trains in policy.precision"),
        Only("mtp_num_layers", (0, None), "multi-token prediction", "0"),
        Only("virtual_pipeline_model_parallel_size", (1, None), "interleaved pipeline stages", "null"),
        Changed(
            "moe_token_dispatcher_type moe_enable_deepep",
            ("alltoall", "allgather", False, None),
            "NCCL's all-to-all sends tokens to their experts: equal results, slower than DeepEP",
        ),
        Only("cuda_graph_impl", ("none", None), "CUDA graphs in training", "none"),
        Only(
            "fine_grained_activation_offloading",
            (False, None),
            "offloading of activations or optimizer state",
            "activation_checkpointing=true",
        ),
        Ignored("freeze_config.freeze_vision_* freeze_config.freeze_sound_* freeze_vision_* freeze_sound_*", TEXT),
        Only("freeze_config.*", (False, None), FROZEN, "false, or policy.freeze_parameters in a recipe of Hetstep"),
        Changed("transformer_impl", ("transformer_engine", None), "training uses Megatron-Core's default modules"),
        Changed("moe_per_layer_logging track_moe_metrics", (False, None), "the load of experts is not logged"),
        Ignored("mtp_* cuda_graph_* offload_modules moe_flex_* *hybridep_*"),  # of those above
        Ignored("inference_* moe_pad_experts_for_cuda_graph_inference clear_memory_caches_before_refit"),
        Ignored("use_gloo_process_groups use_fused_weighted_squared_relu fused_linear_logprobs_chunk_size"),
        Done("enabled env_vars.* use_fused_linear_logprobs scheduler.lr_decay_iters scheduler.*_weight_decay"),
        Done("moe_router_load_balancing_type moe_aux_loss_coeff moe_router_bias_update_rate"),
        # NeMo-RL does not read these, or sets them itself.
        Ignored("converter_type moe_router_enable_expert_bias train_iters calculate_per_token_loss"),
        Ignored("scale_loss_by_dp_cp_size do_not_average_loss cp_normalize checkpoint.*"),
        Ignored("distributed_data_parallel_config.average_in_collective"),
        Ignored("distributed_data_parallel_config.data_parallel_sharding_strategy"),  # of use_custom_fsdp
    ),
)
LORA = under(
    "megatron_cfg.peft",
    (
        Same("enabled target_modules exclude_modules dim alpha dropout dropout_position lora_A_init_method"),
        Only("lora_B_init_method", ("zero",), LORA_OPTION, "zero"),
        Changed("lora_dtype", (None, "None"), "adapters are in policy.precision, the default of lora_dtype"),
        Ignored("a2a_experimental"),
    ),
)
OPTIMIZER_RULES = under(
    "megatron_cfg.optimizer",
    (
        Only("optimizer", ("adam",), "this optimizer", "adam"),
        Ignored("muon_*", "the optimizer is adam"),
        Same("lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad use_precision_aware_optimizer"),
        Only("fp16", (False, None), "this optimizer", "false: policy.precision=bfloat16 needs no loss scaling"),
        Only("optimizer_cpu_offload", (False, None), "offloading of activations or optimizer state", "false"),
        Changed("bf16", (True, None), "main weights are float32 in any case"),
        Changed("use_distributed_optimizer", (True, None), "data ranks shard the optimizer's state, which needs less memory"),
        Ignored("params_dtype sgd_momentum optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d"),
    ),
)
SCHEDULER_RULES = under(
    "megatron_cfg.scheduler",
    (
        Same("lr_decay_style lr_warmup_iters lr_warmup_init weight_decay_incr_style"),
        Ignored("override_opt_param_scheduler"),
    ),
)


def translate(t: Translator, algorithm: str) -> None:
    """Translate Megatron-Core's section with its optimizer and schedule."""
    environment_variables(t, f"{KEY}.env_vars", "cluster.train.env_vars")
    if has_experts(t.get("policy.model_name")) is not False:  # some recipes of dense models set it too, without effect
        t.copy(BIAS)
    t.consume(BIAS)
    frozen = "freeze_moe_router=true freezes routers" if t.on(f"{KEY}.freeze_moe_router") else ""
    frozen = ADAPTED if t.on(f"{KEY}.peft.enabled") else frozen
    from_megatron(t, f"{KEY}.moe_router_load_balancing_type", f"{KEY}.moe_aux_loss_coeff", frozen)
    if not t.on(f"{KEY}.activation_checkpointing"):
        for name in ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"):
            t.consume(f"{KEY}.{name}")
    if t.get(f"{KEY}.moe_token_dispatcher_type") == "allgather" and t.get(f"{KEY}.expert_model_parallel_size", 1) > 1:
        t.change(f"{KEY}.moe_token_dispatcher_type=allgather", "an all-to-all sends tokens to experts, with equal results")
    fused, size = f"{KEY}.use_fused_linear_logprobs", f"{KEY}.fused_linear_logprobs_chunk_size"
    if t.consume(fused) is True:
        chunk = t.get(size, 256)
        t.put("policy.logprob_chunk_size", chunk, size if t.has(size) else fused)
        t.change(f"{fused}=true", f"policy.logprob_chunk_size={chunk} limits the logits in memory")
    _adapters(t)
    _muon(t)
    _schedule(t, algorithm)
    apply(t, under("policy", (*OPTIMIZER_RULES, *SCHEDULER_RULES, *LORA, *MEGATRON)))


def _adapters(t: Translator) -> None:
    """Translate the choice of modules that get adapters. Without target_modules, NeMo-RL gives the experts none."""
    peft = f"{KEY}.peft"
    t.consume_off(peft)
    if not t.on(f"{peft}.enabled"):
        return
    start = t.get(f"{peft}.lora_A_init_method")
    if start not in ("xavier", "kaiming", None):
        t.lacks(f"{peft}.lora_A_init_method", start, LORA_OPTION, "xavier or kaiming")
        t.consume(f"{peft}.lora_A_init_method")
    all_layers = not t.get(f"{peft}.target_modules")
    if all_layers:
        t.change(f"{peft}.target_modules=[]", "all linear layers except the output layer get adapters")
    if not has_experts(t.get("policy.model_name")):
        return
    if all_layers:
        t.put(f"{peft}.exclude_modules", [*(t.consume(f"{peft}.exclude_modules") or ()), modules.EXPERTS])
    else:
        t.change(f"{peft}.target_modules", "each expert has its own adapter; NeMo-RL's experts of a rank share one")


def _muon(t: Translator) -> None:
    """Refuse Muon, and name the keys with which FSDP2 has the same updates.

    Megatron-Core scales updates by muon_extra_scale_factor sqrt(max(out, in)); match_rms_adamw has 0.2 in place of this factor.
    Weight decay is multiplied by the rate, so it changes by the inverse.
    """
    name, o = t.get(f"{OPTIMIZER}.optimizer"), dict(t.get(OPTIMIZER) or {})
    if name not in ("muon", "dist_muon"):
        return
    t.consume(f"{OPTIMIZER}.optimizer")
    lr, decay, factor = (o.get(key, d) for key, d in (("lr", None), ("weight_decay", 0.01), ("muon_extra_scale_factor", 1.0)))
    keys = "policy.dtensor_cfg.enabled=true with policy.optimizer.name=torch.optim.Muon"
    numbers = all(isinstance(value, int | float) and value for value in (lr, decay, factor))
    if numbers and o.get("muon_scale_mode", "spectral") == "spectral":
        adamw = f"{{lr: {lr}, weight_decay: {decay}, betas: [{o.get('adam_beta1', 0.9)}, {o.get('adam_beta2', 0.999)}]}}"
        momentum, nesterov = o.get("muon_momentum", 0.95), str(o.get("muon_use_nesterov", False)).lower()
        rates = f"lr: {lr * factor / 0.2:.6g}, weight_decay: {decay * 0.2 / factor:.6g}, adjust_lr_fn: match_rms_adamw"
        keys += f" and policy.optimizer.kwargs={{{rates}, momentum: {momentum}, nesterov: {nesterov}, adamw: {adamw}}}"
    t.lacks(f"{OPTIMIZER}.optimizer", name, "Muon with Megatron-Core", keys)


def has_experts(model: str | None) -> bool | None:
    """Return whether the model is a mixture of experts; None if its config.json is not available."""
    config = described(model)
    return None if config is None else expert_count(config) > 0


def _schedule(t: Translator, algorithm: str) -> None:
    """Translate the optimizer and its schedule.

    NeMo-RL advances the schedule by train_global_batch_size samples for each train() call, and counts the same number of
    samples as one iteration. So an iteration of its schedule is a step of the algorithm, as in Hetstep. DPO and RM double both
    numbers.
    """
    for absent in (OPTIMIZER, SCHEDULER):
        if t.get(absent) is None:
            t.problem(absent, "missing-value", "is not given; Megatron-Core needs it, and NeMo-RL has no default for it")
            t.consume(OPTIMIZER)
            t.consume(SCHEDULER)
            return
    start, end = (t.consume(f"{SCHEDULER}.{end_}_weight_decay") for end_ in ("start", "end"))
    if start != end:
        t.put(f"{SCHEDULER}.start_weight_decay", start)
        t.put(f"{SCHEDULER}.end_weight_decay", end)
    elif end is not None and end != t.get(f"{OPTIMIZER}.weight_decay"):
        t.put(f"{OPTIMIZER}.weight_decay", end, f"{SCHEDULER}.end_weight_decay")
        dropped = t.consume(f"{OPTIMIZER}.weight_decay")
        t.change(f"{OPTIMIZER}.weight_decay={dropped}", f"the schedule's {end} applies, as in Megatron-Core")
    t.put_defaults({f"{OPTIMIZER}.clip_grad": 1.0, f"{SCHEDULER}.lr_decay_style": "linear"}, SCHEDULER)  # Megatron-Core's
    decay, warm = t.consume(f"{SCHEDULER}.lr_decay_iters"), f"{SCHEDULER}.lr_warmup_iters"
    if t.get(f"{SCHEDULER}.lr_decay_style", "linear") == "constant":
        steps = warm_up_iters(t, SCHEDULER, decay, algorithm)
        if steps != t.get(warm, 0):
            t.consume(warm)
            t.put(warm, steps, f"{SCHEDULER}.lr_decay_iters")
    elif decay is None:
        _decay_with_the_run(t, algorithm, f"{SCHEDULER}.lr_decay_iters")
    else:
        t.put(f"{SCHEDULER}.lr_decay_iters", decay)


def warm_up_iters(t: Translator, scheduler: str, decay: int | None, algorithm: str) -> int:
    """Return lr_warmup_iters of a learning rate that is constant after its warm-up.

    scheduler: the key of the schedule's section. decay: its lr_decay_iters. If the warm-up is not shorter than the decay,
    NeMo-RL shortens it to one sample less than the decay: ConfigContainer of Megatron-Bridge, _calculate_scheduler_steps.
    """
    key = f"{scheduler}.lr_warmup_iters"
    warm_up = t.get(key) or 0
    end, source = (decay, f"{scheduler}.lr_decay_iters") if decay else (_run(t, algorithm), f"{algorithm}.max_num_steps")
    if end is None or warm_up < end:
        return warm_up
    if warm_up > end:
        t.change(f"{key}={warm_up}", f"{end}, since {source}={end} ends the warm-up, as in NeMo-RL")
    return end


def _run(t: Translator, algorithm: str) -> int | None:
    """Return how often a run advances the schedules (NeMo-RL's train_iters); None if max_num_steps sets no bound.

    NeMo-RL uses the smaller of max_num_steps and the number of steps in all epochs. The latter is not known here, because it
    depends on the size of the data.
    """
    steps = max_num_steps(t, algorithm) or (OfflineConfig if algorithm in OFFLINE else OnlineConfig).max_num_steps
    return None if bound(steps) is None else steps * epochs(t, algorithm)


def _decay_with_the_run(t: Translator, algorithm: str, decay: str) -> None:
    key, end = f"{algorithm}.max_num_steps", _run(t, algorithm)
    if end is None:
        t.problem(decay, "missing-value", f"got null; expected the step at which the decay ends, here or at {key}")
    else:
        t.put(decay, end, key)
        t.change(f"{decay}=null", f"the decay ends with the run, at {key}={end}; the size of the data does not matter")
