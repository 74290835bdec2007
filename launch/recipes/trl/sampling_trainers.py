"""Translate GRPO and RLOO: advantages, losses, sampling.

The formulas are those of trl/trainer/grpo_trainer.py and rloo_trainer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.recipes.translation.rules import Changed, Done, Ignored, Only, apply
from launch.recipes.translation.translator import Translator
from launch.recipes.trl.trl_lengths import RunLength

GENERATION = "policy.generation"
VLLM = f"{GENERATION}.vllm_cfg"
PROMPT_TOKENS = 512
"""Tokens of the longest prompt where nothing says otherwise, TRL's default while it had one."""
UNBOUNDED_RATIO = 1e9
LOSSES = {
    "vespo": "VESPO's weights of sequences",
    "luspo": "LUSPO's sum over tokens",
}
KEPT = "the gradient of an update has the same direction and another size, which matters where max_grad_norm clips it"
AVERAGES = {
    "bnpo": "the mean is over all tokens of an update; TRL averages over the tokens of each microbatch",
    "dr_grpo": f"the loss is divided by the number of tokens, not by a constant: {KEPT}",
}
RULES = (
    Done("temperature top_p top_k use_vllm vllm_mode vllm_gpu_memory_utilization vllm_tensor_parallel_size beta epsilon"),
    Done("max_completion_length vllm_max_model_length max_prompt_length num_generations_eval mask_truncated_completions"),
    Done("epsilon_high delta loss_type scale_rewards importance_sampling_level multi_objective_aggregation entropy_coef"),
    Done("top_entropy_quantile"),
    Done("use_bias_correction_kl normalize_advantages reward_clip_range steps_per_generation generation_batch_size"),
    Done("vllm_importance_sampling_correction vllm_importance_sampling_mode num_generations"),
    Done("vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min sapo_temperature_pos sapo_temperature_neg"),
    Only("num_iterations", (1,), "several passes over a step's samples without a critic", "1"),
    Only("min_p", (None, 0, 0.0), "sampling with min_p", "null"),
    Only("repetition_penalty", (1.0, 1), "a repetition penalty in sampling", "1.0"),
    Only("generation_kwargs", (None,), "arguments of generation", "null, or policy.generation of Hetstep"),
    Only("vllm_structured_outputs_regex vllm_guided_decoding_regex", (None,), "answers of a given form", "null"),
    Only("sync_ref_model", (False, None), "a reference policy that changes", "false"),
    Only("use_adaptive_entropy", (False, None), "a weight of the entropy that changes", "false"),
    Only("max_tool_calling_iterations", (None,), "tools of TRL", "null, and env.NAME.kind=tools of Hetstep"),
    Only("off_policy_mask_threshold", (None,), "masks of sequences by their KL divergence", "null"),
    Changed("cast_lm_head_to_fp32", (False, None), "the head is computed in policy.precision"),
    Ignored("vllm_* use_transformers_paged"),
)


def translate(t: Translator, trainer: str, length: RunLength, ours: Mapping[str, Any]) -> None:
    """Translate advantages, losses and sampling."""
    if trainer == "rloo":
        _rloo(t, length)
    else:
        _advantages(t)
        _loss(t, length)
        _kl(t, length)
        _correction(t)
    t.put("grpo.overlong_filtering", t.on("mask_truncated_completions"), "mask_truncated_completions")
    _sampling(t)
    _engines(t, ours)
    apply(t, RULES)


# ---- GRPO ------------------------------------------------------------------------------------------------------------------


def _advantages(t: Translator) -> None:
    scale = t.get("scale_rewards")
    scale = {True: "group", False: "none"}.get(scale, scale) if isinstance(scale, bool) else scale
    t.put("grpo.use_leave_one_out_baseline", False, "num_generations")
    if scale not in ("group", "none"):
        feature = "advantages divided by the deviation of the whole batch" if scale == "batch" else "this scale of rewards"
        t.lacks("scale_rewards", scale, feature, "group or none, or grpo.adv_estimator.name=reinforce_plus_plus")
    if t.get("multi_objective_aggregation") == "normalize_then_sum":
        t.put("grpo.adv_estimator.name", "gdpo", "multi_objective_aggregation")
        scale = "group"
    t.put("grpo.normalize_rewards", scale == "group", "scale_rewards")


def _loss(t: Translator, length: RunLength) -> None:
    kind, sequences = t.get("loss_type"), t.get("importance_sampling_level") == "sequence"
    low, high, delta = t.get("epsilon"), t.get("epsilon_high"), t.get("delta")
    high_key = "epsilon" if high is None else "epsilon_high"
    high = low if high is None else high
    if kind in LOSSES or kind not in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"):
        t.lacks("loss_type", kind, LOSSES.get(str(kind), "this loss"), "one of: grpo, bnpo, dr_grpo, dapo, cispo, sapo")
    elif kind in AVERAGES:
        t.change(f"loss_type={kind}", AVERAGES[str(kind)])
    elif kind not in ("grpo", "sapo") and length.updates > 1:
        t.change(f"loss_type={kind}", "the mean is over an update's tokens; TRL's over those of its generation batch")
    if kind == "cispo":
        if high < 1:
            text = f"got {high}, with which cispo bounds every ratio to {high}; expected at least 1, such as 5.0"
            t.problem(high_key, "too-small", text)
        t.put("loss_fn.use_cispo", True, "loss_type")
        t.put("loss_fn.ratio_clip_min", 1.0, "loss_type")  # no lower bound
        t.put("loss_fn.ratio_clip_max", max(0.0, high - 1), high_key)
    else:
        t.put("loss_fn.ratio_clip_min", low, "epsilon")
        t.put("loss_fn.ratio_clip_max", high, high_key)
        t.put("loss_fn.ratio_clip_c", delta, "delta")
    if kind == "sapo":
        t.put("loss_fn.use_sapo", True, "loss_type")
        t.put("loss_fn.ratio_clip_c", None, "delta")
        for side in ("positive", "negative"):
            t.put(f"loss_fn.sapo_temperature_{side}", t.get(f"sapo_temperature_{side[:3]}"), f"sapo_temperature_{side[:3]}")
    if sequences:
        t.put("loss_fn.sequence_level_importance_ratios", True, "importance_sampling_level")
        if kind != "grpo":
            t.change(f"loss_type={kind}", "with ratios of sequences, the loss is a mean over sequences, as loss_type=grpo")
    t.put("loss_fn.token_level_loss", kind not in ("grpo", "sapo") and not sequences, "loss_type")
    t.put("loss_fn.entropy_coeff", t.get("entropy_coef"), "entropy_coef")
    _high_entropy(t)


def _high_entropy(t: Translator) -> None:
    share, bonus = t.get("top_entropy_quantile"), t.get("entropy_coef")
    t.put("loss_fn.top_entropy_quantile", share, "top_entropy_quantile")
    if share < 1 and bonus:
        t.lacks("entropy_coef", bonus, "an entropy bonus of the tokens of the highest entropy alone", "0")
    if share < 1:
        text = "the quantile is of an update's tokens and of pi_old; TRL's of each microbatch of all processes"
        t.change(f"top_entropy_quantile={share}", text)


def _kl(t: Translator, length: RunLength) -> None:
    """Translate the penalty: k3, and with use_bias_correction_kl times pi / pi_old, which has a gradient too."""
    t.put("loss_fn.reference_policy_kl_penalty", t.get("beta"), "beta")
    t.put("loss_fn.reference_policy_kl_type", "k3", "beta")
    for bound in ("input", "output"):
        t.put(f"loss_fn.kl_{bound}_clamp_value", None, "beta")
    corrected = t.on("use_bias_correction_kl")
    t.put("loss_fn.reference_policy_kl_gradient", "kl" if corrected else "estimate", "use_bias_correction_kl")
    if t.get("beta") and corrected and length.updates > 1:
        t.put("loss_fn.use_on_policy_kl_approximation", True, "use_bias_correction_kl")
        t.change("use_bias_correction_kl", "the KL is weighted by pi / pi_generate; in TRL by pi / pi_old")


def _correction(t: Translator) -> None:
    """Translate the weights pi_old / pi_generate, which TRL uses only with vLLM."""
    key, mode = "vllm_importance_sampling_mode", str(t.get("vllm_importance_sampling_mode"))
    if not t.on("use_vllm") or not t.on("vllm_importance_sampling_correction"):
        return
    level, _, bounds = mode.partition("_")
    if level not in ("token", "sequence") or bounds not in ("mask", "truncate"):
        t.lacks(key, mode, "this importance sampling", "token_truncate, token_mask, sequence_truncate or sequence_mask")
        return
    high, low = t.get("vllm_importance_sampling_clip_max"), t.get("vllm_importance_sampling_clip_min")
    t.put("loss_fn.use_importance_sampling_correction", True, "vllm_importance_sampling_correction")
    t.put("loss_fn.sequence_level_importance_weights", level == "sequence", key)
    t.put("loss_fn.truncated_importance_sampling_type", "icepop" if bounds == "mask" else "tis", key)
    ours = "loss_fn.truncated_importance_sampling_ratio"
    t.put(ours, UNBOUNDED_RATIO if high is None else high, "vllm_importance_sampling_clip_max")
    t.put(f"{ours}_min", 0.0 if low is None else low, "vllm_importance_sampling_clip_min")


# ---- RLOO ------------------------------------------------------------------------------------------------------------------


def _rloo(t: Translator, length: RunLength) -> None:
    t.put("grpo.use_leave_one_out_baseline", True, "num_generations")
    t.put("grpo.normalize_rewards", False, "normalize_advantages")
    if t.on("normalize_advantages"):
        t.lacks("normalize_advantages", True, "advantages divided by the deviation of the whole batch", "false")
    if length.updates > 1:
        t.lacks(
            "steps_per_generation", t.get("steps_per_generation"), "clipped ratios of RLOO's sequences", "one update per step"
        )
    t.put("loss_fn.disable_ppo_ratio", True, "epsilon")
    t.put("loss_fn.token_level_loss", True, "epsilon")
    t.change("num_generations", f"the loss is divided by the number of tokens, in TRL of sequences: {KEPT}")
    if (bounds := t.get("reward_clip_range")) is not None:
        low, high = bounds
        scaling = {"source_min": low, "source_max": high, "target_min": low, "target_max": high}
        t.put("grpo.reward_scaling", {"enabled": True} | scaling, "reward_clip_range")
    if beta := t.get("beta"):
        t.put("loss_fn.reference_policy_kl_penalty", beta, "beta")
        t.put("loss_fn.reference_policy_kl_type", "k1", "beta")
        t.put("loss_fn.reference_policy_kl_gradient", "kl", "beta")
        for bound in ("input", "output"):
            t.put(f"loss_fn.kl_{bound}_clamp_value", None, "beta")
        text = (
            "the penalty on the KL from the reference is in the loss; in TRL it is in the reward, where it also counts what a"
            " token does to the KL of later tokens"
        )
        t.change(f"beta={beta}", text)


# ---- sampling --------------------------------------------------------------------------------------------------------------


def _sampling(t: Translator) -> None:
    answer, longest = t.get("max_completion_length"), t.get("vllm_max_model_length")
    prompt = t.get("max_prompt_length")
    if prompt is None and longest is not None:
        prompt = longest - answer
    if prompt is None:
        prompt = PROMPT_TOKENS
        text = f"a prompt has at most {prompt} tokens here, and a longer one is an error before the run"
        t.change("max_prompt_length", f"{text}; --max_prompt_length N sets another number. TRL has no limit")
    elif t.origins.get("max_prompt_length"):
        t.put("data.overlong_prompts", "drop", "max_prompt_length")
        t.change("max_prompt_length", "longer prompts are left out; earlier versions of TRL cut their beginning")
    t.put("data.max_input_seq_length", prompt, "max_prompt_length")
    t.put(f"{GENERATION}.max_new_tokens", answer, "max_completion_length")
    t.put("policy.max_total_sequence_length", prompt + answer, "max_completion_length")
    t.put(f"{GENERATION}.temperature", t.get("temperature"), "temperature")
    t.put(f"{GENERATION}.top_p", t.get("top_p"), "top_p")
    t.put(f"{GENERATION}.top_k", t.get("top_k") or None, "top_k")
    if t.get("top_p") != 1 or t.get("top_k"):
        t.change("top_p, top_k", "training truncates the policy's distribution as sampling does; TRL's uses all tokens")
    n = t.get("num_generations_eval") or t.get("num_generations")
    t.put(
        "grpo.val_num_generations_per_prompt", n, "num_generations_eval" if t.get("num_generations_eval") else "num_generations"
    )


def _engines(t: Translator, ours: Mapping[str, Any]) -> None:
    size = t.get("vllm_tensor_parallel_size")
    if not t.on("use_vllm"):
        t.put(f"{GENERATION}.colocated.enabled", True, "use_vllm")
        t.change("use_vllm=false", "vLLM samples in place of transformers, from the same distribution")
        return
    mode = t.get("vllm_mode")
    t.put(f"{GENERATION}.colocated.enabled", mode == "colocate", "vllm_mode")
    t.put(f"{VLLM}.tensor_parallel_size", size, "vllm_tensor_parallel_size")
    t.put(f"{VLLM}.gpu_memory_utilization", t.get("vllm_gpu_memory_utilization"), "vllm_gpu_memory_utilization")
    if mode == "server" and "cluster.generate.gpus_per_node" not in ours:
        t.put("cluster.generate.gpus_per_node", size, "vllm_mode")
        t.change("vllm_mode=server", f"the job has {size} GPUs for engines in place of a server; cluster.generate sets others")
    elif mode not in ("server", "colocate"):
        t.lacks("vllm_mode", mode, "this mode of vLLM", "colocate or server")
