"""Translate `actor_rollout_ref.rollout`: sampling in training and validation, and vLLM's engines."""

from __future__ import annotations

from typing import Any

from launch.recipes.translation.rules import Changed, Done, Ignored, Only, apply, under
from launch.recipes.translation.translator import Translator
from launch.recipes.verl.verl_defaults import ROLLOUT

GENERATION = "policy.generation"
VLLM = f"{GENERATION}.vllm_cfg"
ENGINES = {"sglang": "SGLang", "trtllm": "TensorRT-LLM", "hf": "transformers", "vllm_omni": "vLLM-Omni"}
COPIED = {  # verl's key -> ours
    "tensor_model_parallel_size": f"{VLLM}.tensor_parallel_size",
    "pipeline_model_parallel_size": f"{VLLM}.pipeline_parallel_size",
    "gpu_memory_utilization": f"{VLLM}.gpu_memory_utilization",
    "enforce_eager": f"{VLLM}.enforce_eager",
    "enable_prefix_caching": f"{VLLM}.enable_prefix_caching",
    "max_num_seqs": f"{GENERATION}.max_num_seqs",
    "max_num_batched_tokens": f"{GENERATION}.vllm_kwargs.max_num_batched_tokens",
    "temperature": f"{GENERATION}.temperature",
    "top_p": f"{GENERATION}.top_p",
}
AGENTS = "agents with tools of verl (multi_turn, agent loops)"
REPLICAS = Changed("data_parallel_size", (1, None), "engines have no data-parallel ranks; each engine is its own replica")
RULES = under(
    ROLLOUT,
    (
        Done(f"{' '.join(COPIED)} n name nnodes top_k prompt_length response_length max_model_len"),
        Done("val_kwargs.temperature val_kwargs.top_p val_kwargs.top_k val_kwargs.n"),
        Ignored("do_sample val_kwargs.do_sample"),  # which verl's rollouts do not read
        Done("expert_parallel_size log_prob_micro_batch_size_per_gpu quantization enable_chunked_prefill multi_turn.enable"),
        Only("ignore_eos", (False, None), "answers that go on after the end token", "false"),
        Only("dtype", ("bfloat16", "float16", "float32", "auto", None), "this precision of engines", "bfloat16"),
        Ignored("enable_rollout_routing_replay"),  # router_replay.mode decides
        Only("disaggregation.enabled", (False, None), "separate engines for prefill and decoding", "false"),
        Only("over_sample_rate", (0, None), "answers that are sampled and left out", "0"),
        Only("quantization_config_file", (None,), "generation with a file of quantization", "null"),
        Only("agent.default_agent_loop", ("single_turn_agent", None), AGENTS, "single_turn_agent"),
        Only("agent.agent_loop_config_path agent.custom_async_server.path", (None,), AGENTS, "null"),
        Only("mode", ("async", "sync", None), "this mode of engines", "async"),
        Only("logprobs_mode", ("processed_logprobs", None), "log-probs before temperature and top_p", "processed_logprobs"),
        REPLICAS,
        Changed("seed full_determinism", (42, 0, None, False), "grpo.seed, or ppo.seed, determines the random numbers"),
        Ignored("n_gpus_per_node free_cache_engine load_format layered_summon multi_stage_wake_up calculate_log_probs"),
        Ignored("skip_tokenizer_init disable_log_stats cudagraph_capture_sizes scheduling_policy moe_load_balance_* mtp*"),
        Ignored("checkpoint_engine.* agent.* trace.* profiler.* prometheus.* disaggregation.* qat* _target_ *._target_"),
        Ignored("multi_turn.*", "has no effect while multi_turn.enable is false"),
        Ignored("engine_kwargs.* moe_tensor_parallel_size val_kwargs.*"),
        Ignored("log_prob_*"),
    ),
)


def translate(t: Translator, algorithm: str) -> None:
    """Translate sampling and engines."""
    prompt, answer = (_length(t, f"{ROLLOUT}.{name}_length", f"data.max_{name}_length") for name in ("prompt", "response"))
    _lengths(t, prompt, answer)
    for name, ours in COPIED.items():
        t.put(ours, t.get(f"{ROLLOUT}.{name}"), f"{ROLLOUT}.{name}")
    t.put(f"{GENERATION}.top_k", _top_k(t.get(f"{ROLLOUT}.top_k")), f"{ROLLOUT}.top_k")
    _validation(t, algorithm)
    translate_experts(t, ROLLOUT, VLLM, t.get(f"{ROLLOUT}.tensor_model_parallel_size"))
    if (quantization := t.get(f"{ROLLOUT}.quantization")) == "fp8":
        t.put(f"{VLLM}.precision", "fp8", f"{ROLLOUT}.quantization")
    elif quantization is not None:
        t.lacks(f"{ROLLOUT}.quantization", quantization, "this precision of engines", "null or fp8")
    if t.get(f"{ROLLOUT}.enable_chunked_prefill") is False:
        t.put(f"{GENERATION}.vllm_kwargs.enable_chunked_prefill", False, f"{ROLLOUT}.enable_chunked_prefill")
    if t.get(f"{ROLLOUT}.multi_turn.enable") is True:
        t.lacks(f"{ROLLOUT}.multi_turn.enable", True, AGENTS, "false, or env.NAME.kind=tools of Hetstep")
        t.consume(f"{ROLLOUT}.multi_turn")
    translate_engine(t, ROLLOUT, GENERATION)
    apply(t, RULES)


def _length(t: Translator, own: str, of_data: str) -> tuple[Any, str]:
    """Return (tokens, the key that says so): the rollout's own key, which is the data's by default."""
    length, of_data_length = t.get(own), t.consume(of_data)
    return (of_data_length, of_data) if length is None else (length, own)


def _lengths(t: Translator, prompt: tuple[Any, str], answer: tuple[Any, str]) -> None:
    t.put("data.max_input_seq_length", *prompt)
    t.put(f"{GENERATION}.max_new_tokens", *answer)
    if isinstance(prompt[0], int) and isinstance(answer[0], int):
        t.put("policy.max_total_sequence_length", prompt[0] + answer[0], answer[1])
        longest = t.get(f"{ROLLOUT}.max_model_len")
        if isinstance(longest, int) and longest < prompt[0] + answer[0]:
            text = f"got {longest}; expected at least the prompt's and the answer's tokens, {prompt[0]} + {answer[0]}"
            t.problem(f"{ROLLOUT}.max_model_len", "too-small", text)


def _validation(t: Translator, algorithm: str) -> None:
    """Translate the sampling in validation. verl's rollouts do not read val_kwargs.do_sample; a temperature of 0 is greedy."""
    key = f"{ROLLOUT}.val_kwargs"
    t.put(f"{GENERATION}.val_temperature", t.get(f"{key}.temperature"), f"{key}.temperature")
    t.put(f"{GENERATION}.val_top_p", t.get(f"{key}.top_p"), f"{key}.top_p")
    t.put(f"{GENERATION}.val_top_k", _top_k(t.get(f"{key}.top_k")), f"{key}.top_k")
    t.put(f"{algorithm}.val_num_generations_per_prompt", t.get(f"{key}.n"), f"{key}.n")


def _top_k(value: object) -> object:
    """Return top_k; None for -1 and 0, which mean all tokens."""
    return None if value in (-1, 0) else value


def translate_experts(t: Translator, rollout: str, ours: str, ranks: Any) -> None:
    """Translate the expert parallelism of engines. ours: our section. ranks: tensor-parallel ranks of an engine."""
    key = f"{rollout}.expert_parallel_size"
    experts = t.get(key)
    if isinstance(experts, int) and experts > 1:
        t.put(f"{ours}.expert_parallel_size", ranks, key)
        if experts != ranks:
            t.change(f"{key}={experts}", f"the {ranks} tensor-parallel ranks of an engine hold whole experts")


def translate_engine(t: Translator, rollout: str, ours: str) -> None:
    """Translate the name of the engines, all of which are vLLM here, and vLLM's own arguments. ours: our section."""
    name = t.get(f"{rollout}.name", "vllm")
    if isinstance(name, str) and name in ENGINES:
        t.change(f"{rollout}.name={name}", f"vLLM samples in place of {ENGINES[name]}, from the same distribution")
    elif name != "vllm":
        t.lacks(f"{rollout}.name", name, "this engine", "vllm")
    for key, value in list(t.unconsumed_leaves()):
        if key.startswith(f"{rollout}.engine_kwargs.vllm.") and value is not None:
            argument = key.removeprefix(f"{rollout}.engine_kwargs.vllm.")
            t.consume(key)
            if not argument.startswith("mm_"):  # of pictures
                t.put(f"{ours}.vllm_kwargs.{argument}", value, key)
