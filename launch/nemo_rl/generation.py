"""`policy.generation`."""

from __future__ import annotations

from launch.nemo_rl.cluster import environment_variables
from launch.nemo_rl.features import Feature
from launch.nemo_rl.ledger import Ledger
from launch.nemo_rl.rules import Only, apply, ignored, same, under

KEY = "policy.generation"
MOST_SEQUENCES = 1024  # that vLLM decodes at once where nothing is said, on GPUs with 70 GB and more

# What other transports of theirs do that ours does too.
TRANSPORTS = {
    "vllm_zmq_sparse": ("delta", "only what changed travels"),
    "vllm_s3_sparse": ("delta", "only what changed travels"),
    "nixl": ("planned", "each rank receives its own shard, by NCCL"),
}

OTHER_ENGINES = (
    "mcore_generation_config.*",
    "sglang_cfg.*",
    "sglang_kwargs.*",
    "trtllm_cfg.*",
    "trtllm_kwargs.*",
    "dynamo_cfg.*",
)

GENERATION = (
    Only(("backend",), ("vllm",), Feature.BACKEND, "vllm"),
    same("max_new_tokens", "stop_token_ids"),
    Only(("stop_strings", "bad_words"), (None, []), Feature.STOP_STRINGS, "stop_token_ids ends an answer by a token"),
    Only(("quant_cfg",), (None,), Feature.QUANTIZATION, "null generates in policy.precision"),
    ignored("real_quant*"),  # of that
    ignored(*OTHER_ENGINES),
    ignored("port_range_*", "refit_cfg.*", "use_async_rollouts"),
)

VLLM = under(
    "vllm_cfg",
    (
        same(
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "gpu_memory_utilization",
            "max_model_len",
            "enforce_eager",
        ),
        Only(("kv_cache_dtype",), ("auto", None), Feature.FP8_CACHE, "auto has policy.precision"),
        ignored("use_deep_gemm"),  # a kernel of precision fp8
        # How its engines are run and watched. Ours are stepped in process, and serve nothing over the network.
        ignored("async_engine", "distributed_executor_backend", "skip_tokenizer_init", "load_format", "enable_expert_parallel"),
        ignored("use_tqdm", "enable_vllm_metrics_logger", "vllm_metrics_logger_interval", "*_refit_*"),
        ignored("reset_encoder_cache_after_weight_update", "expose_http_server", "http_server_serving_chat_kwargs.*"),
        ignored("reasoning_parser_plugin", "tool_parser_plugin", "cap_max_tokens_to_context"),
        Only(("video.*",), (None,), Feature.MULTIMODAL),
        Only(("enable_return_routed_experts",), (False, None), Feature.ROUTER_REPLAY, "false"),
    ),
)

OF_FP8 = ("is_mx", "num_first_layers_in_bf16", "num_last_layers_in_bf16", "quantization_ignored_layer_kws")

TAKEN = (
    *(f"{stage}{name}" for stage in ("", "val_") for name in ("temperature", "top_p", "top_k")),
    "refit_transport",
    "colocated.*",
    "vllm_kwargs.*",
    "vllm_cfg.precision",
    *(f"vllm_cfg.{key}" for key in OF_FP8),
    "vllm_cfg.logprobs_mode",
    "vllm_cfg.expert_parallel_size",
    "vllm_cfg.enable_prefix_caching",
    "vllm_cfg.env_vars.*",
)


def translate(ledger: Ledger, samples: bool) -> None:
    if not samples:
        ledger.take(KEY)
        return
    _sampling(ledger)
    _transport(ledger)
    if ledger.get(f"{KEY}.backend") == "vllm":
        _vllm(ledger)
        apply(ledger, under(KEY, VLLM))
    apply(ledger, under(KEY, GENERATION))
    if ledger.get(f"{KEY}.backend") != "vllm":  # which is told
        ledger.take(f"{KEY}.vllm_cfg")
        ledger.take(f"{KEY}.vllm_kwargs")


def _sampling(ledger: Ledger) -> None:
    """-1 is vLLM's word for no top_k. Theirs refuses validation of its own sampling but with NeMo Gym; ours has it."""
    own = []
    for name, default in (("temperature", 1.0), ("top_p", 1.0), ("top_k", None)):
        train = _unbounded(ledger.get(f"{KEY}.{name}", default))
        validation = _unbounded(ledger.get(f"{KEY}.val_{name}", train))
        if ledger.has(f"{KEY}.{name}"):
            ledger.put(f"{KEY}.{name}", train, f"{KEY}.{name}")
        if validation != train:
            ledger.put(f"{KEY}.val_{name}", validation, f"{KEY}.val_{name}")
            own.append(f"val_{name}={validation}")
        ledger.take(f"{KEY}.{name}")
        ledger.take(f"{KEY}.val_{name}")
    if own:
        ledger.change(
            f"{KEY}.{own[0].partition('=')[0]}", f"validation samples with {', '.join(own)}; there only with NeMo Gym"
        )
    if ledger.get(f"{KEY}.stop_token_ids"):
        ledger.change(
            f"{KEY}.stop_token_ids",
            "these, the tokenizer's end token and those of the model's generation_config.json end an answer; there the"
            " tokenizer's does not, unless it is among the others",
        )


def _unbounded(value: object) -> object:
    return None if value == -1 else value


def _transport(ledger: Ledger) -> None:
    key = f"{KEY}.refit_transport"
    theirs = ledger.take(key)
    if theirs in TRANSPORTS:
        ours, how = TRANSPORTS[theirs]
        ledger.put(key, ours, key)
        ledger.change(f"{key}={theirs}", f"{ours}: {how}")
    elif theirs is not None:
        ledger.problem(key, f"'{theirs}' is not one of theirs that ours can stand for: null, {', '.join(TRANSPORTS)}")


def _vllm(ledger: Ledger) -> None:
    key, kwargs = f"{KEY}.vllm_cfg", f"{KEY}.vllm_kwargs"
    environment_variables(ledger, f"{key}.env_vars", f"{key}.env_vars")
    if ledger.get(f"{key}.enable_prefix_caching") is not None:  # null, or absent: on
        ledger.copy(f"{key}.enable_prefix_caching")
    ledger.take(f"{key}.enable_prefix_caching")
    _precision(ledger, key)
    _experts(ledger, key)
    if ledger.has(f"{kwargs}.max_num_seqs"):
        ledger.move(f"{kwargs}.max_num_seqs", f"{KEY}.max_num_seqs")
    else:
        ledger.put(f"{KEY}.max_num_seqs", MOST_SEQUENCES, f"{KEY}.backend")
    method = ledger.get(f"{kwargs}.speculative_config.method")
    if method not in (None, "ngram"):
        ledger.lacks(f"{kwargs}.speculative_config.method", method, Feature.DRAFTING, "ngram drafts from the text so far")
    ledger.take(f"{kwargs}.tokenizer")  # our engines take tokens and give tokens
    for name in ledger.get(kwargs) or {}:
        if name not in ("max_num_seqs", "tokenizer"):
            ledger.copy(f"{kwargs}.{name}")
    ledger.take(kwargs)


def _precision(ledger: Ledger, key: str) -> None:
    precision, trained = ledger.take(f"{key}.precision"), ledger.get("policy.precision")
    if precision == "fp8":
        _fp8(ledger, key)
    elif precision not in (None, "auto", trained):
        ledger.problem(f"{key}.precision", f"{precision}, but engines have policy.precision, {trained}")
    for name in OF_FP8:  # without it they say nothing
        ledger.take(f"{key}.{name}")
    mode = ledger.take(f"{key}.logprobs_mode", "raw_logprobs")  # vLLM's own default
    plain = ledger.get(f"{KEY}.temperature", 1.0) == 1 and ledger.get(f"{KEY}.top_p", 1.0) == 1
    if mode != "processed_logprobs" and not (plain and ledger.get(f"{KEY}.top_k") in (None, -1)):
        ledger.lacks(f"{key}.logprobs_mode", mode, Feature.RAW_LOGPROBS, "processed_logprobs, or temperature 1")


def _fp8(ledger: Ledger, key: str) -> None:
    """Theirs is vLLM's with blocks of 128 x 128, as ours is; it has another with the blocks of MXFP8."""
    ledger.put(f"{key}.precision", "fp8", f"{key}.precision")
    if ledger.get(f"{key}.is_mx"):
        ledger.lacks(f"{key}.is_mx", True, Feature.MXFP8_GENERATION, "false has blocks of 128 x 128")
    for name in ("num_first_layers_in_bf16", "num_last_layers_in_bf16"):
        if count := ledger.get(f"{key}.{name}"):
            ledger.lacks(f"{key}.{name}", count, Feature.MIXED_GENERATION, "0, and quantization_ignored_layer_kws by name")
    if ledger.get(f"{key}.quantization_ignored_layer_kws"):
        ledger.copy(f"{key}.quantization_ignored_layer_kws")


def _experts(ledger: Ledger, key: str) -> None:
    """Theirs spreads them over tensor x data-parallel ranks; an engine of ours has no data-parallel ones."""
    size, tensor = ledger.take(f"{key}.expert_parallel_size", 1), ledger.get(f"{key}.tensor_parallel_size", 1)
    if size in (1, tensor):
        ledger.put(f"{key}.expert_parallel_size", size, f"{key}.expert_parallel_size")
    else:
        ledger.lacks(f"{key}.expert_parallel_size", size, Feature.ENGINE_DATA_PARALLEL, f"1, or tensor_parallel_size {tensor}")
