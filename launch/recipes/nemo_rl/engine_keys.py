"""Translate the keys of other engines than vLLM: SGLang, TensorRT-LLM, Megatron-Core's, and Dynamo, which serves vLLM.

In Hetstep vLLM samples. All engines sample from the same distribution, so an engine's keys are of three kinds. Its size and
memory become vLLM's. Keys that change the samples (precision, quantization) are translated or give a problem. Keys that only
tune the engine are ignored, each by its name.
"""

from __future__ import annotations

from launch.recipes.translation.rules import Changed, Done, Ignored, Only, Rule, Same, apply, if_set, under
from launch.recipes.translation.translator import Translator

KEY = "policy.generation"
VLLM = f"{KEY}.vllm_cfg"
MOST = f"{KEY}.max_num_seqs"
NAMES = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "megatron": "Megatron-Core", "dynamo": "Dynamo"}
PRECISION = "this precision of engines"
CACHE = "a KV cache in 8 bits"


def _tuning(name: str) -> str:
    return f"tunes {NAMES[name]}, which does not sample here"


SGLANG = under(
    "sglang_cfg",
    (
        Same("context_length", if_set, ours=f"{VLLM}.max_model_len"),
        Same("mem_fraction_static", if_set, ours=f"{VLLM}.gpu_memory_utilization"),
        Same("max_running_requests", if_set, ours=MOST),
        Same("disable_cuda_graph", if_set, ours=f"{VLLM}.enforce_eager"),
        Same("disable_radix_cache", lambda off: not off, ours=f"{VLLM}.enable_prefix_caching"),
        Only("dtype", ("bfloat16", "float32", "float16", "auto", None), PRECISION, "policy.precision"),
        Only("kv_cache_dtype", ("auto", None), CACHE, "auto"),
        Only("torchao_config", ("", None), "generation with quantized weights", "null"),
        Only("enable_lora lora_paths max_lora_rank lora_target_modules", (False, None), "adapters of engines", "null"),
        Only("enable_multimodal", (False, None), "images, sound or video", "false"),
        Done("tp_size pp_size ep_size dp_size"),
        # The policy's model, and sizes that follow from `cluster`.
        Ignored("model_path sglang_server_config.num_gpus sglang_server_config.num_gpus_per_engine"),
        Ignored("random_seed", "the algorithm's seed determines the random numbers of each sample"),
        Ignored("allow_auto_truncate", "longer prompts are dropped before sampling: data.max_input_seq_length"),
        Ignored(
            "sglang_server_config.* sglang_router_config.* skip_tokenizer_init disable_cuda_graph_padding enable_nccl_nvls"
            " disable_piecewise_cuda_graph disable_outlines_disk_cache disable_custom_all_reduce disable_overlap_schedule"
            " enable_mixed_chunk enable_dp_attention enable_deepep_moe enable_ep_moe enable_torch_compile torch_compile_max_bs"
            " cuda_graph_max_bs cuda_graph_bs enable_nan_detection enable_p2p_check triton_attention_reduce_in_fp32"
            " triton_attention_num_kv_splits num_continuous_decode_steps attention_backend sampling_backend"
            " chunked_prefill_size max_prefill_tokens schedule_policy schedule_conservativeness cpu_offload_gb"
            " max_loaded_loras max_loras_per_batch lora_backend log_level log_level_http log_requests log_requests_level"
            " show_time_cost enable_metrics decode_log_interval enable_multithread_load enable_fast_load skip_server_warmup",
            _tuning("sglang"),
        ),
    ),
)
TRTLLM = (
    Same("trtllm_cfg.gpu_memory_utilization", if_set, ours=f"{VLLM}.gpu_memory_utilization"),
    Same("trtllm_cfg.max_model_len", if_set, ours=f"{VLLM}.max_model_len"),
    Same("trtllm_cfg.max_batch_size", if_set, ours=MOST),
    Same("trtllm_kwargs.kv_cache_config.mamba_ssm_cache_dtype", if_set, ours=f"{KEY}.vllm_kwargs.mamba_ssm_cache_dtype"),
    Only("trtllm_cfg.precision", ("bfloat16", "float32", "float16", "auto", None), PRECISION, "policy.precision"),
    Only("trtllm_kwargs.kv_cache_config.dtype", ("auto", None), CACHE, "auto"),
    Only(
        "trtllm_cfg.tool_parser trtllm_cfg.reasoning_parser",
        (None,),
        "parsing of tool calls or reasoning in an engine's server",
        "null",
    ),
    Done("trtllm_cfg.tensor_parallel_size trtllm_cfg.moe_expert_parallel_size trtllm_cfg.moe_tensor_parallel_size"),
    # Theirs must equal the keys of the same name in grpo.async_grpo.
    Ignored("trtllm_cfg.in_flight_weight_updates trtllm_cfg.recompute_kv_cache_after_weight_updates"),
    Ignored("trtllm_cfg.model_name trtllm_cfg.async_engine trtllm_cfg.expose_http_server"),
    Ignored(
        "trtllm_cfg.max_num_tokens trtllm_kwargs.batch_wait_timeout_iters trtllm_kwargs.batch_wait_max_tokens_ratio"
        " trtllm_kwargs.enable_attention_dp trtllm_kwargs.cuda_graph_config.* trtllm_kwargs.enable_chunked_prefill",
        _tuning("trtllm"),
    ),
)
MEGATRON = under(
    "mcore_generation_config",
    (
        Same("max_model_len", if_set, ours=f"{VLLM}.max_model_len"),
        Same("enable_prefix_caching", if_set, ours=f"{VLLM}.enable_prefix_caching"),
        Same("mamba_inference_ssm_states_dtype", if_set, ours=f"{KEY}.vllm_kwargs.mamba_ssm_cache_dtype"),
        Same("mamba_inference_conv_states_dtype", if_set, ours=f"{KEY}.vllm_kwargs.mamba_cache_dtype"),
        Only(
            "moe_router_num_groups moe_router_group_topk",
            (None,),
            "another selection of experts in engines than in training",
            "null",
        ),
        Changed("moe_router_dtype", (None,), "vLLM selects the precision of the router"),
        Done("tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size"),
        Ignored("context_parallel_size expert_tensor_parallel_size sequence_parallel activation_checkpointing"),
        Ignored("expose_http_server parsers logging_step_interval"),
        Ignored(
            "buffer_size_gb block_size_tokens max_tokens num_cuda_graphs use_cuda_graphs_for_non_decode_steps cuda_graph_impl"
            " inference_cuda_graph_scope materialize_only_last_token_logits enable_chunked_prefill refit_backend"
            " num_speculative_tokens kv_cache_management_mode transformer_impl inference_* unified_memory_level",
            _tuning("megatron"),
        ),
    ),
)
DYNAMO = under(
    "dynamo_cfg",
    (
        Only("engine", ("vllm",), "this generation backend", "vllm"),
        Only("*.extra_cli_args", ([],), "command-line options of a server", "policy.generation.vllm_kwargs"),
        Only(
            "worker_args.tool_call_parser worker_args.reasoning_parser",
            (None,),
            "parsing of tool calls or reasoning in an engine's server",
            "null",
        ),
        Only("worker_args.custom_jinja_template", (None,), "a second chat template", "policy.tokenizer.chat_template"),
        Ignored(
            "startup_timeout_s request_timeout_s control_timeout_s metrics_* worker_args.* frontend_args.*", _tuning("dynamo")
        ),
    ),
)


RULES: dict[str, tuple[Rule, ...]] = {"sglang": SGLANG, "trtllm": TRTLLM, "megatron": MEGATRON, "dynamo": DYNAMO}


SECTIONS = {
    "sglang": ("sglang_cfg", "sglang_kwargs"),
    "trtllm": ("trtllm_cfg", "trtllm_kwargs"),
    "megatron": ("mcore_generation_config",),
    "dynamo": ("dynamo_cfg",),
}


def sections_of_others(backend: str | None) -> tuple[str, ...]:
    """Return the sections of `policy.generation` that engines other than `backend` read, and `backend` does not."""
    return tuple(section for name, sections in SECTIONS.items() if name != backend for section in sections)


def translate(t: Translator, backend: str) -> None:
    """Translate an engine's section into vLLM's keys, with a note that vLLM samples. Raises KeyError for another backend."""
    rules = RULES[backend]
    t.consume(f"{KEY}.backend")
    t.put(f"{KEY}.backend", "vllm")
    t.change(f"{KEY}.backend={backend}", "vLLM samples instead, from the same distribution; its kernels round differently")
    if backend == "sglang":
        section = f"{KEY}.sglang_cfg"
        if (copies := t.get(f"{section}.dp_size", 1)) not in (1, None):
            t.lacks(f"{section}.dp_size", copies, "data parallelism within an engine", "1")
        _size(t, f"{section}.tp_size", f"{section}.pp_size", f"{section}.ep_size")
        _precision(t, f"{section}.dtype")
    elif backend == "trtllm":
        section = f"{KEY}.trtllm_cfg"
        _size(t, f"{section}.tensor_parallel_size", "", f"{section}.moe_expert_parallel_size")
        _precision(t, f"{section}.precision")
    elif backend == "megatron":
        _size(t, *(_megatron_key(t, f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline", "expert")))
    apply(t, under(KEY, rules))


def _megatron_key(t: Translator, name: str) -> str:
    """Return the key that sets a parallel size of Megatron-Core's engine: in its section, or else in the policy's."""
    key = f"{KEY}.mcore_generation_config.{name}"
    return key if t.has(key) else f"policy.megatron_cfg.{name}"


def _size(t: Translator, tensor: str, pipeline: str, experts: str) -> None:
    """Translate the parallel sizes of an engine.

    tensor, pipeline, experts: NeMo-RL's keys of these sizes; "" for a size that the engine does not have.
    """
    ranks, sharded = t.get(tensor) or 1, t.get(experts) or 1
    t.put(f"{VLLM}.tensor_parallel_size", ranks, tensor)
    t.put(f"{VLLM}.pipeline_parallel_size", t.get(pipeline) or 1, pipeline or tensor)
    t.put(f"{VLLM}.expert_parallel_size", ranks if sharded == ranks else 1, experts)
    if sharded not in (1, ranks):
        t.change(f"{experts}={sharded}", "an engine shards each expert over its tensor-parallel ranks: equal results")


def _precision(t: Translator, key: str) -> None:
    trained = t.get("policy.precision")
    if (precision := t.get(key)) in ("bfloat16", "float32", "float16") and precision != trained:
        t.lacks(key, precision, PRECISION, f"policy.precision, {trained}")
