"""Translate the model and the engine that trains it: FSDP or Megatron-Core, their parallel sizes, adapters, offloading."""

from __future__ import annotations

import os
from typing import Any

from launch.recipes.translation.balancing_losses import ADAPTED, from_megatron
from launch.recipes.translation.rules import Changed, Done, Ignored, Only, apply, under
from launch.recipes.translation.translator import Translator

DTENSOR, MEGATRON = "policy.dtensor_cfg", "policy.megatron_cfg"
PRECISIONS = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16", "float32": "float32"}
PRECISIONS["fp32"] = "float32"
TEXT = "images, sound or video"
NPU = "selects kernels of another accelerator or engine"

MEGATRON_LORA = {  # model/hf_model.yaml, `lora`
    "dropout": 0.0,
    "dropout_position": "pre",
    "lora_A_init_method": "xavier",
    "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "exclude_modules": [],
}

MODEL = (
    Done("path tokenizer_path custom_chat_template enable_gradient_checkpointing use_liger"),
    Done("lora_rank lora_alpha target_modules exclude_modules"),
    Done("override_config.*"),
    Only("lora_adapter_path lora.adapter_path", (None,), "a start from a trained adapter", "null, and a merged model in path"),
    Only("external_lib", (None,), "a library that changes the model", "null"),
    Only("hf_config_path", (None,), "a configuration apart from the model's files", "null"),
    Only("mtp.enable", (False, None), "multi-token prediction", "false"),
    Ignored("mtp.*"),
    Changed("trust_remote_code", (False, None), "code in the model's files is not run; the model must be in transformers"),
    Changed("enable_activation_offload", (False, None), "activations stay on the GPUs, which needs more memory"),
    Changed("tiled_mlp.enabled", (False, None), "MLPs are computed whole, which needs more memory"),
    Ignored("use_shm use_remove_padding use_fused_kernels fused_kernel_options.* tiled_mlp.* lora.* _target_ override_config"),
)
FSDP = (
    Done("fsdp_size model_dtype dtype offload_policy ulysses_sequence_parallel_size"),
    Only("qat.enable", (False, None), "quantization-aware training", "false"),
    Only("mixed_precision.param_dtype", ("bf16", "bfloat16", None), "this mixed precision", "bf16"),
    Changed("mixed_precision.reduce_dtype", ("fp32", "float32", None), "gradients are reduced in float32, which is more exact"),
    Changed("full_determinism", (False, None), "policy.deterministic=true gives the same bits in each run"),
    Ignored("param_offload optimizer_offload"),  # train ranks free their GPUs for engines in any case
    Ignored("wrap_policy.* reshard_after_forward forward_prefetch use_orig_params seed use_torch_compile forward_only"),
    Ignored(
        "entropy_from_logits_* entropy_checkpointing pad_to_length* strategy turbo_config.* qat.* mixed_precision.* _target_"
    ),
)
MEGATRON_RULES = (
    Done("tensor_model_parallel_size expert_model_parallel_size expert_tensor_parallel_size context_parallel_size"),
    Done("pipeline_model_parallel_size sequence_parallel dtype"),
    Only("virtual_pipeline_model_parallel_size", (None, 1), "interleaved pipeline stages", "null"),
    Only("dynamic_context_parallel", (False, None), "context-parallel sizes that change", "false"),
    Changed("use_megatron_fsdp", (False, None), "weights are replicated, and data ranks shard the optimizer's state"),
    Only("qat.enable", (False, None), "quantization-aware training", "false"),
    Done("router_replay.mode"),
    Changed("use_distributed_optimizer", (True, None), "data ranks shard the optimizer's state, which needs less memory"),
    Ignored("use_dist_checkpointing dist_checkpointing_path", "the first step reads the Hugging Face files of model.path"),
    Ignored("param_offload grad_offload optimizer_offload"),  # as for FSDP
    Ignored("dist_c* distrib_* max_seqlen_per_dp_cp_rank seed use_mbridge vanilla_mbridge use_remove_padding pad_* strategy"),
    Ignored("forward_only entropy_from_logits_* qat.* router_replay.* override_mcore_model_config.* _target_ vpp"),
    Ignored("override_mcore_model_config override_ddp_config override_transformer_config"),
    Ignored("override_ddp_config.*", "gradients are reduced in float32, during the backward pass"),
)
LAYERS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
COPIED = (
    *LAYERS,
    "moe_router_dtype",
    "moe_shared_expert_overlap",
    "moe_router_bias_update_rate",
    "gradient_accumulation_fusion",
)
"""Keys of override_transformer_config that are ours in policy.megatron_cfg."""
KERNELS = ("moe_permute_fusion", "moe_grouped_gemm", "apply_rope_fusion", "bias_activation_fusion")
"""Kernels that we use if they are installed, so that true needs no key."""
TRANSFORMER = (  # override_transformer_config
    Done("recompute_granularity recompute_modules recompute_method recompute_num_layers attention_backend"),
    Done(" ".join((*COPIED, *KERNELS))),
    Done("moe_router_load_balancing_type moe_aux_loss_coeff"),
    Changed(
        "moe_token_dispatcher_type moe_enable_deepep",
        ("alltoall", "allgather", False, None),
        "NCCL's all-to-all sends tokens to their experts: equal results, slower than DeepEP",
    ),
    Only("mtp_num_layers", (0, None), "multi-token prediction", "0"),
    Ignored("use_flash_attn use_triton_gdn use_naive_l2norm use_ascend_gdn use_fused_mhc *dsa_kernel_fusion", NPU),
    Ignored("persist_layer_norm masked_softmax_fusion bias_dropout_fusion deallocate_pipeline_outputs cp_partition_mode"),
    Ignored("sequence_packing_scheduler max_seqlen_per_dp_cp_rank moe_router_enable_expert_bias"),
    Only("pipeline_model_parallel_layout", (None,), "a free layout of pipeline stages", f"the keys {' '.join(LAYERS)}"),
)


def translate(t: Translator, model: str, section: str, engine: str) -> None:
    """Translate the model and the engine of the policy. model, section: their sections, such as actor_rollout_ref.model."""
    _model(t, model)
    for backend, cfg in (("dp", DTENSOR), ("megatron", MEGATRON)):
        t.put(f"{cfg}.enabled", engine == backend, f"{section}.strategy")
    if engine == "megatron":
        _megatron(t, section, ADAPTED if t.get(f"{model}.lora.rank") else "")
        _adapters(t, model, f"{MEGATRON}.peft")
    else:
        _fsdp(t, section)
        _adapters(t, model, f"{DTENSOR}.lora_cfg")
    on = t.get(f"{model}.enable_gradient_checkpointing") is True
    if engine == "dp":
        t.put(f"{DTENSOR}.activation_checkpointing", on, f"{model}.enable_gradient_checkpointing")
        t.put(f"{DTENSOR}.use_liger_kernel", t.get(f"{model}.use_liger") is True, f"{model}.use_liger")
    for key, value in list(t.unconsumed_leaves()):
        if key.startswith(f"{model}.override_config.") and t.consume(key) is not None:
            t.put(f"policy.hf_config_overrides.{key.removeprefix(f'{model}.override_config.')}", value, key)
    apply(t, under(model, MODEL))


def _model(t: Translator, model: str) -> None:
    path = t.get(f"{model}.path")
    t.put("policy.model_name", os.path.expanduser(path) if isinstance(path, str) else path, f"{model}.path")
    if (tokenizer := t.get(f"{model}.tokenizer_path")) is not None:
        t.put("policy.tokenizer.name", os.path.expanduser(str(tokenizer)), f"{model}.tokenizer_path")
    if (template := t.get(f"{model}.custom_chat_template")) is not None:
        t.put("policy.tokenizer.chat_template", template, f"{model}.custom_chat_template")


def _precision(t: Translator, key: str) -> None:
    name = t.get(key)
    if name in PRECISIONS:
        t.put("policy.precision", PRECISIONS[name], key)
    else:
        t.lacks(key, name, "this precision", "bfloat16")


def sequence_ranks(t: Translator, section: str, engine: str) -> int:
    """Return the number of ranks that share a sequence."""
    keys = [f"{section}.ulysses_sequence_parallel_size", f"{section}.{ENGINE_SECTION}.ulysses_sequence_parallel_size"]
    if engine == "megatron":
        keys = [f"{section}.megatron.context_parallel_size", f"{section}.context_parallel_size"]
    sizes = [size for key in keys if isinstance(size := t.get(key), int)]
    return max(sizes, default=1)


ENGINE_SECTION = "fsdp_config"
"""The name of FSDP's section of the actor; the SFT trainer's `engine` has no section of its own."""


def _fsdp(t: Translator, section: str) -> None:
    own = f"{section}.{ENGINE_SECTION}" if t.get(f"{section}.{ENGINE_SECTION}") is not None else section
    _precision(t, f"{own}.dtype")
    if (held := t.get(f"{own}.model_dtype")) not in ("fp32", "float32", None):
        t.change(f"{own}.model_dtype={held}", "weights of the optimizer are float32, which is more exact and needs more memory")
    if (ranks := sequence_ranks(t, section, "dp")) > 1:
        t.put(f"{DTENSOR}.context_parallel_size", ranks, f"{own}.ulysses_sequence_parallel_size")
        t.change(
            f"{own}.ulysses_sequence_parallel_size={ranks}",
            f"{ranks} ranks share each sequence by context parallelism, in place of Ulysses, with equal results",
        )
    t.consume(f"{section}.ulysses_sequence_parallel_size")
    sharding, world = t.get(f"{own}.fsdp_size"), _world(t)
    if isinstance(sharding, int) and 0 < sharding < world:
        if world % sharding:
            t.problem(f"{own}.fsdp_size", "not-divisible", f"got {sharding}; expected a divisor of all {world} GPUs")
        else:
            t.put(f"{DTENSOR}.data_parallel_replicate_size", world // sharding, f"{own}.fsdp_size")
    t.put(f"{DTENSOR}.cpu_offload", t.get(f"{own}.offload_policy") is True, f"{own}.offload_policy")
    apply(t, under(own, FSDP))


def _world(t: Translator) -> int:
    nodes, gpus = t.get("trainer.nnodes", 1), t.get("trainer.n_gpus_per_node", 1)
    return nodes * gpus if isinstance(nodes, int) and isinstance(gpus, int) else 1


def _megatron(t: Translator, section: str, frozen: str) -> None:
    """Translate the engine. frozen: why routers do not train; empty if they do."""
    own = f"{section}.megatron" if t.get(f"{section}.megatron") is not None else section
    _precision(t, f"{own}.dtype")
    for name in ("tensor_model", "pipeline_model", "context", "expert_model"):
        t.put(f"{MEGATRON}.{name}_parallel_size", t.get(f"{own}.{name}_parallel_size"), f"{own}.{name}_parallel_size")
    if (experts := t.get(f"{own}.expert_tensor_parallel_size")) is not None:
        t.put(f"{MEGATRON}.expert_tensor_parallel_size", experts, f"{own}.expert_tensor_parallel_size")
    shards = (t.get(f"{own}.tensor_model_parallel_size") or 1) > 1 and t.get(f"{own}.sequence_parallel") is True
    t.put(f"{MEGATRON}.sequence_parallel", shards, f"{own}.sequence_parallel")
    t.put(f"{MEGATRON}.freeze_moe_router", False, own)
    if (mode := t.get(f"{own}.router_replay.mode")) == "R3":
        t.put("policy.router_replay.enabled", True, f"{own}.router_replay.mode")
    elif mode not in ("disabled", None):
        t.lacks(f"{own}.router_replay.mode", mode, "replay of the routing of the trainer's own log-probs", "R3")
    overrides = f"{own}.override_transformer_config"
    from_megatron(t, f"{overrides}.moe_router_load_balancing_type", f"{overrides}.moe_aux_loss_coeff", frozen)
    _transformer(t, overrides)
    apply(t, under(own, MEGATRON_RULES))


def _transformer(t: Translator, key: str) -> None:
    """Translate override_transformer_config. Keys without a rule are Megatron-Core's, and go to model_overrides."""
    granularity = t.get(f"{key}.recompute_granularity")
    t.put(f"{MEGATRON}.activation_checkpointing", granularity is not None, f"{key}.recompute_granularity")
    for name in ("granularity", "method", "num_layers", "modules"):
        value = t.get(f"{key}.recompute_{name}")
        if granularity is not None and value is not None and not (name == "modules" and granularity == "full"):
            t.put(f"{MEGATRON}.recompute_{name}", value, f"{key}.recompute_{name}")
    for name in COPIED:
        if (value := t.get(f"{key}.{name}")) is not None:
            t.put(f"{MEGATRON}.{name}", value, f"{key}.{name}")
    for name in KERNELS:
        if t.get(f"{key}.{name}") is False:
            t.put(f"{MEGATRON}.{name}", False, f"{key}.{name}")
    if (backend := t.get(f"{key}.attention_backend")) in ("flash", "fused", "unfused"):
        t.put(f"{MEGATRON}.attention_backend", backend, f"{key}.attention_backend")
    apply(t, under(key, TRANSFORMER))
    for leaf, value in list(t.unconsumed_leaves()):
        if leaf.startswith(f"{key}."):
            t.consume(leaf)
            if value is not None:
                t.put(f"{MEGATRON}.model_overrides.{leaf.removeprefix(f'{key}.')}", value, leaf)


def _adapters(t: Translator, model: str, ours: str) -> None:
    """Translate LoRA. With Megatron-Core verl reads model.lora, with FSDP model.lora_rank."""
    megatron = ours.startswith(MEGATRON)
    rank_key = f"{model}.lora.rank" if megatron else f"{model}.lora_rank"
    rank = t.get(rank_key, 0)
    if not rank:
        return
    alpha = f"{model}.lora.alpha" if megatron else f"{model}.lora_alpha"
    t.put(f"{ours}.enabled", True, rank_key)
    t.put(f"{ours}.dim", rank, rank_key)
    t.put(f"{ours}.alpha", t.get(alpha, 32 if megatron else 16), alpha)
    if megatron:
        for name, default in MEGATRON_LORA.items():
            t.put(f"{ours}.{name}", t.consume(f"{model}.lora.{name}", default), f"{model}.lora.{name}")
        return
    t.put(f"{ours}.lora_A_init", "kaiming", rank_key)  # peft's own
    targets: Any = t.get(f"{model}.target_modules")
    every = targets in ("all-linear", None)
    t.put(f"{ours}.match_all_linear", every, f"{model}.target_modules")
    if not every:
        t.put(f"{ours}.target_modules", [targets] if isinstance(targets, str) else targets, f"{model}.target_modules")
    excluded: Any = t.get(f"{model}.exclude_modules")
    if excluded:
        t.put(f"{ours}.exclude_modules", [excluded] if isinstance(excluded, str) else excluded, f"{model}.exclude_modules")
