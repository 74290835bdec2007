"""Translate `policy.generation`."""

from __future__ import annotations

from launch.recipes.nemo_rl import engine_keys
from launch.recipes.nemo_rl.cluster_keys import environment_variables
from launch.recipes.translation.rules import Done, Ignored, Only, Same, apply, if_set, under
from launch.recipes.translation.translator import Translator

KEY = "policy.generation"
VLLM = f"{KEY}.vllm_cfg"

# NeMo-RL's refit transport -> (our equivalent, its description).
TRANSPORTS = {
    "vllm_zmq_sparse": ("delta", "only changed weights are sent"),
    "vllm_s3_sparse": ("delta", "only changed weights are sent"),
    "nixl": ("planned", "each rank receives its own shard, by NCCL"),
}
OF_FP8 = ("is_mx", "num_first_layers_in_bf16", "num_last_layers_in_bf16", "quantization_ignored_layer_kws")

GENERATION = (
    Done("temperature top_p top_k val_temperature val_top_p val_top_k refit_transport vllm_kwargs.*"),
    Only("backend", ("vllm",), "this generation backend", f"one of: vllm, {', '.join(engine_keys.RULES)}"),
    Same("max_new_tokens stop_token_ids"),
    Same("stop_strings"),
    Only("bad_words", (None, []), "words that are never sampled", "null"),
    Only("quant_cfg", (None,), "quantization-aware training", "null, which generates in policy.precision"),
    Ignored("real_quant* port_range_* refit_cfg.* use_async_rollouts"),
)
VLLM_RULES = under(
    "vllm_cfg",
    (
        Same("tensor_parallel_size pipeline_parallel_size gpu_memory_utilization max_model_len enforce_eager"),
        Same("enable_prefix_caching", if_set),  # null, or absent: on
        Only("kv_cache_dtype", ("auto", None), "a KV cache in 8 bits", "auto, which uses policy.precision"),
        Ignored("use_deep_gemm"),  # a kernel of precision fp8
        Done("precision logprobs_mode expert_parallel_size env_vars.*"),
        Done(" ".join(OF_FP8)),
        # How engines run and are monitored. Our engines run in the rank's process and have no server.
        Ignored("async_engine distributed_executor_backend skip_tokenizer_init load_format enable_expert_parallel"),
        Ignored("use_tqdm enable_vllm_metrics_logger vllm_metrics_logger_interval *_refit_*"),
        Ignored("reset_encoder_cache_after_weight_update expose_http_server http_server_serving_chat_kwargs.*"),
        Ignored("enable_thinking enforce_monotonicity"),  # in recipes of agents; no code of NeMo-RL reads them
        Ignored("reasoning_parser_plugin tool_parser_plugin cap_max_tokens_to_context"),
        Only("video.*", (None,), "images, sound or video"),
        Ignored("enable_return_routed_experts", "policy.router_replay.enabled decides what engines record"),
    ),
)


def translate(t: Translator, samples: bool) -> None:
    """Translate sampling, refit transport and vLLM's keys. samples: whether the algorithm samples; else ignore the section."""
    if not samples:
        t.consume(KEY)
        return
    _sampling(t)
    _transport(t)
    backend = t.get(f"{KEY}.backend")
    vllm = backend in ("vllm", "dynamo")
    if vllm:
        _vllm(t)
    else:  # vLLM's keys have no effect then
        t.consume(VLLM)
        t.consume(f"{KEY}.vllm_kwargs")
    for section in engine_keys.sections_of_others(backend):
        t.consume(f"{KEY}.{section}")
    if isinstance(backend, str) and backend in engine_keys.RULES:
        engine_keys.translate(t, backend)
    apply(t, under(KEY, (*VLLM_RULES, *GENERATION) if vllm else GENERATION))


def _sampling(t: Translator) -> None:
    """Translate the sampling parameters, and those of validation, which NeMo-RL only uses with NeMo Gym."""
    values = []
    for name, default in (("temperature", 1.0), ("top_p", 1.0), ("top_k", None)):
        train = _top_k(t.consume(f"{KEY}.{name}", default))
        validation = _top_k(t.consume(f"{KEY}.val_{name}", train))
        if t.has(f"{KEY}.{name}"):
            t.put(f"{KEY}.{name}", train)
        if validation != train:
            t.put(f"{KEY}.val_{name}", validation)
            values.append(f"val_{name}={validation}")
    if values:
        key = f"{KEY}.{values[0].partition('=')[0]}"
        t.change(key, f"validation uses {', '.join(values)}; in NeMo-RL only with NeMo Gym")
    if t.get(f"{KEY}.stop_token_ids"):
        message = (
            "an answer ends at these tokens, the EOS tokens of the tokenizer and of the model's configs, and the chat"
            " template's end of a turn; in NeMo-RL only at these tokens and those of the model's configs"
        )
        t.change(f"{KEY}.stop_token_ids", message)
    if t.get(f"{KEY}.stop_strings"):
        message = (
            "an answer keeps the tokens of the stop string; environments get the text before the string, in NeMo-RL with the"
            " string"
        )
        t.change(f"{KEY}.stop_strings", message)


def _top_k(top_k: object) -> object:
    """Return top_k, or None for vLLM's value -1, which means no top_k."""
    return None if top_k == -1 else top_k


def _transport(t: Translator) -> None:
    key = f"{KEY}.refit_transport"
    transport = t.consume(key)
    if transport in TRANSPORTS:
        name, difference = TRANSPORTS[transport]
        t.put(key, name)
        t.change(f"{key}={transport}", f"{name}: {difference}")
    elif transport is not None:
        message = f"got '{transport}'; expected null, or one of: {', '.join(TRANSPORTS)}"
        t.problem(key, "not-a-choice", message)


def _vllm(t: Translator) -> None:
    kwargs, prefixes = f"{KEY}.vllm_kwargs", f"{VLLM}.enable_prefix_caching"
    if t.get("policy.router_replay.enabled") and t.get(prefixes) is False:
        t.consume(prefixes)
        t.change(prefixes, "true, since vLLM keeps the experts that it records beside its cache of prefixes")
    environment_variables(t, f"{VLLM}.env_vars", "cluster.generate.env_vars")
    _precision(t)
    size, tensor = t.consume(f"{VLLM}.expert_parallel_size", 1), t.get(f"{VLLM}.tensor_parallel_size", 1)
    if size in (1, tensor):
        t.put(f"{VLLM}.expert_parallel_size", size)
    else:  # NeMo-RL spreads experts over tensor x data-parallel ranks; our engines have no data-parallel ranks
        t.put(f"{VLLM}.expert_parallel_size", tensor)
        message = f"each engine holds all experts, over its {tensor} ranks: equal results, with more memory"
        t.change(f"{VLLM}.expert_parallel_size={size}", message)
    if t.has(f"{kwargs}.max_num_seqs"):
        t.put(f"{KEY}.max_num_seqs", t.consume(f"{kwargs}.max_num_seqs"), f"{kwargs}.max_num_seqs")
    method = t.get(f"{kwargs}.speculative_config.method")
    if method not in (None, "ngram"):
        message = "engines sample without a draft model, from the same distribution, in more time"
        t.change(f"{kwargs}.speculative_config.method={method}", message)
        t.consume(f"{kwargs}.speculative_config")
    for name in t.get(kwargs) or {}:
        of_drafts = name == "speculative_config" and method not in (None, "ngram")
        if name not in ("max_num_seqs", "tokenizer") and not of_drafts:  # our engines read and return token ids
            t.copy(f"{kwargs}.{name}")
    t.consume(kwargs)


def _precision(t: Translator) -> None:
    precision, trained = t.consume(f"{VLLM}.precision"), t.get("policy.precision")
    if precision == "fp8":  # vLLM's, with blocks of 128 x 128, as ours; NeMo-RL has MXFP8 too
        t.put(f"{VLLM}.precision", "fp8")
        if t.get(f"{VLLM}.is_mx"):
            t.lacks(f"{VLLM}.is_mx", True, "generation in MXFP8", "false, which has blocks of 128 x 128")
        for name in ("num_first_layers_in_bf16", "num_last_layers_in_bf16"):
            if count := t.get(f"{VLLM}.{name}"):
                feature = "generation with 8 bits in some layers, selected by position"
                t.lacks(f"{VLLM}.{name}", count, feature, "0, and quantization_ignored_layer_kws to select layers by name")
        if t.get(f"{VLLM}.quantization_ignored_layer_kws"):
            t.copy(f"{VLLM}.quantization_ignored_layer_kws")
    elif precision not in (None, "auto", trained):
        t.problem(f"{VLLM}.precision", "contradiction", f"got {precision}; expected policy.precision, {trained}, or fp8")
    for name in OF_FP8:  # they have no effect without fp8
        t.consume(f"{VLLM}.{name}")
    mode = t.consume(f"{VLLM}.logprobs_mode", "raw_logprobs")  # vLLM's own default
    plain = t.get(f"{KEY}.temperature", 1.0) == 1 and t.get(f"{KEY}.top_p", 1.0) == 1
    if mode != "processed_logprobs" and not (plain and t.get(f"{KEY}.top_k") in (None, -1)):
        t.lacks(f"{VLLM}.logprobs_mode", mode, "log-probs before temperature", "processed_logprobs, or temperature 1")
