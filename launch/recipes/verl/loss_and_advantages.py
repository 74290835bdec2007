"""Translate `algorithm` and the loss of the actor: estimators of advantages, clipping, KL, entropy, rollout correction.

The formulas are those of verl/trainer/ppo/core_algos.py and rollout_corr_helper.py. `python -m tests.foreign.verl_numbers
CLONE` compares losses and gradients.
"""

from __future__ import annotations

from typing import Any

from launch.recipes.translation.rules import Done, Ignored, Only, apply
from launch.recipes.translation.translator import Translator
from launch.recipes.verl import verl_defaults
from launch.recipes.verl.verl_defaults import ACTOR
from pipeline.algorithms.sections import UNBOUNDED

ESTIMATORS: dict[str, dict[str, Any]] = {  # verl's advantages as keys of our section grpo
    "grpo": {"use_leave_one_out_baseline": False},
    "grpo_vectorized": {"use_leave_one_out_baseline": False},
    "rloo": {"use_leave_one_out_baseline": True, "normalize_rewards": False},
    "rloo_vectorized": {"use_leave_one_out_baseline": True, "normalize_rewards": False},
    "reinforce_plus_plus": {"adv_estimator.name": "reinforce_plus_plus", "adv_estimator.minus_baseline": False},
    "reinforce_plus_plus_baseline": {"adv_estimator.name": "reinforce_plus_plus", "adv_estimator.minus_baseline": True},
}
LACKING = {
    "remax": "ReMax, whose baseline is the reward of a greedy answer",
    "opo": "OPO, whose baseline weighs answers by their lengths",
    "gpg": "GPG's advantages",
    "gdpo": "GDPO of the keys of one function's result; grpo.adv_estimator.name=gdpo takes several env.NAME.rewards",
    "grpo_passk": "GRPO's pass@k advantages",
    "optimal_token_baseline": "a baseline for each token",
    "tir_optimal_token_baseline": "a baseline for each token",
}
KL_TYPES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
LOSSES = {
    "gpg": "GPG's loss",
    "clip_cov": "Clip-Cov",
    "kl_cov": "KL-Cov",
    "geo_mean": "GMPO's geometric mean of ratios",
    "dppo_tv": "DPPO's trust region",
    "dppo_kl": "DPPO's trust region",
    "dro": "DRO's loss",
}
SEQUENCE_SUMS = ("seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")

RULES = (
    Done("algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo algorithm.gamma algorithm.lam"),
    Done("algorithm.use_kl_in_reward algorithm.kl_penalty algorithm.kl_ctrl.type algorithm.kl_ctrl.kl_coef"),
    Ignored("algorithm.kl_ctrl.*"),  # of the adaptive controller
    Only("algorithm.use_pf_ppo", (False, None), "PF-PPO's reweighted samples", "false"),
    Ignored("algorithm.pf_ppo.* algorithm.gdpo_reward_keys"),
    Done("algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches algorithm.filter_groups.metric"),
    Ignored("algorithm.filter_groups.max_inflight_gen_batches"),
    Only(
        "algorithm.rollout_correction.rollout_rs",
        (None,),
        "rejection of samples by verl's estimators of the mismatch",
        "null, or loss_fn.truncated_importance_sampling_type=icepop",
    ),
    Only("algorithm.rollout_correction.rollout_is_batch_normalize", (False, None), "normalized importance weights", "false"),
    Ignored("algorithm.rollout_correction.*"),
    Done(f"{ACTOR}.tau_pos {ACTOR}.tau_neg"),
    Ignored(f"{ACTOR}.policy_loss.* {ACTOR}.calculate_sum_pi_squared"),
    Ignored(f"{ACTOR}.clip_ratio {ACTOR}.loss_scale_factor"),
)


def name(t: Translator) -> str:
    """Return our algorithm: ppo with a critic, or grpo. Adds a problem for an estimator that is not supported."""
    estimator = t.get("algorithm.adv_estimator")
    if estimator != "gae" and estimator not in ESTIMATORS:
        feature = LACKING.get(str(estimator), "this estimator of advantages")
        t.lacks("algorithm.adv_estimator", estimator, feature, f"one of: gae, {', '.join(ESTIMATORS)}")
    return "ppo" if estimator == "gae" else "grpo"


def translate(t: Translator, algorithm: str) -> None:
    """Translate the estimator, the policy's loss and the correction of the rollouts."""
    if algorithm == "distillation":  # which has a loss of its own, without rewards
        for key in (name for name in verl_defaults.PPO if name.startswith((f"{ACTOR}.clip", f"{ACTOR}.kl_", f"{ACTOR}.loss_"))):
            t.consume(key)
        for key in ("policy_loss", "use_kl_loss", "entropy_coeff", "calculate_entropy"):
            t.consume(f"{ACTOR}.{key}")
        t.consume("data.gen_batch_size")
    else:
        if not t.on("distillation.enabled"):
            _advantages(t, algorithm)
        _loss(t)
        _kl(t, algorithm)
        _correction(t)
        _groups(t, algorithm)
    apply(t, RULES)


def _advantages(t: Translator, algorithm: str) -> None:
    estimator, key = t.get("algorithm.adv_estimator"), "algorithm.adv_estimator"
    gamma = t.get("algorithm.gamma")
    if algorithm == "ppo":
        t.put("ppo.adv_estimator.gae_gamma", gamma, "algorithm.gamma")
        t.put("ppo.adv_estimator.gae_lambda", t.get("algorithm.lam"), "algorithm.lam")
        t.put("ppo.adv_estimator.normalize_advantages", True, key)
        return
    if gamma != 1.0 and str(estimator).startswith("reinforce_plus_plus") and not str(estimator).endswith("baseline"):
        t.lacks("algorithm.gamma", gamma, "discounted rewards of REINFORCE++", "1.0")
    for ours, value in ESTIMATORS.get(str(estimator), {}).items():
        t.put(f"grpo.{ours}", value, key)
    if str(estimator).startswith("grpo"):
        t.put("grpo.normalize_rewards", t.get("algorithm.norm_adv_by_std_in_grpo"), "algorithm.norm_adv_by_std_in_grpo")
    if str(estimator).startswith("reinforce_plus_plus"):
        t.change(f"{key}={estimator}", "advantages are divided by the biased deviation over all tokens; verl's is unbiased")


def _loss(t: Translator) -> None:
    mode, clip = t.consume(f"{ACTOR}.policy_loss.loss_mode"), t.get(f"{ACTOR}.clip_ratio")
    low, high = (t.consume(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high"))
    for side, bound in (("min", low), ("max", high)):
        theirs = f"{ACTOR}.clip_ratio" + ("" if bound is None else "_low" if side == "min" else "_high")
        t.put(f"loss_fn.ratio_clip_{side}", clip if bound is None else bound, theirs)
    if t.origins.get(f"{ACTOR}.clip_ratio") and clip not in (low, high) and None not in (low, high):
        text = f"has no effect, since clip_ratio_low={low} and clip_ratio_high={high} replace it, as in verl"
        t.ignore(f"{ACTOR}.clip_ratio={clip}", text)
    dual, aggregation = t.consume(f"{ACTOR}.clip_ratio_c"), t.consume(f"{ACTOR}.loss_agg_mode")
    t.put("loss_fn.ratio_clip_c", dual if mode == "vanilla" else None, f"{ACTOR}.clip_ratio_c")
    per_token = aggregation != "seq-mean-token-mean"
    if mode == "gspo":
        t.put("loss_fn.sequence_level_importance_ratios", True, f"{ACTOR}.policy_loss.loss_mode")
        per_token = False  # whatever loss_agg_mode says
    elif mode == "cispo":
        t.put("loss_fn.use_cispo", True, f"{ACTOR}.policy_loss.loss_mode")
    elif mode == "sapo":
        t.put("loss_fn.use_sapo", True, f"{ACTOR}.policy_loss.loss_mode")
        for side, default in (("positive", 1.0), ("negative", 1.05)):
            key = f"{ACTOR}.tau_{side[:3]}"
            t.put(f"loss_fn.sapo_temperature_{side}", t.get(key, default), key)
        per_token = False  # whatever loss_agg_mode says
    elif mode != "vanilla":
        feature = LOSSES.get(str(mode), "this loss")
        t.lacks(f"{ACTOR}.policy_loss.loss_mode", mode, feature, "one of: vanilla, gspo, cispo, sapo")
    if aggregation in SEQUENCE_SUMS and mode not in ("gspo", "sapo"):
        text = (
            "the loss of an update is divided by its number of counted tokens, so that its gradient has the same direction and"
            " another size, which matters where max_grad_norm clips it"
        )
        t.change(f"{ACTOR}.loss_agg_mode={aggregation}", text)
    elif aggregation not in ("token-mean", "seq-mean-token-mean", *SEQUENCE_SUMS):
        t.lacks(f"{ACTOR}.loss_agg_mode", aggregation, "this aggregation of the loss", "token-mean")
    t.put("loss_fn.token_level_loss", per_token, f"{ACTOR}.loss_agg_mode")
    entropy = t.consume(f"{ACTOR}.entropy_coeff")
    t.put("loss_fn.entropy_coeff", entropy, f"{ACTOR}.entropy_coeff")
    if entropy and not per_token:
        t.change(f"{ACTOR}.entropy_coeff", "the entropy is averaged over all tokens; in verl as loss_agg_mode says")
    if t.consume(f"{ACTOR}.calculate_entropy") is True:
        t.put("loss_fn.log_entropy", True, f"{ACTOR}.calculate_entropy")


def _kl(t: Translator, algorithm: str) -> None:
    in_loss, in_reward = t.consume(f"{ACTOR}.use_kl_loss"), t.get("algorithm.use_kl_in_reward")
    coefficient, kind = t.consume(f"{ACTOR}.kl_loss_coef"), t.consume(f"{ACTOR}.kl_loss_type")
    if in_loss and in_reward:
        t.lacks("algorithm.use_kl_in_reward", True, "a KL penalty both in the loss and in the reward", "false")
    elif in_loss:
        _penalty(t, f"{ACTOR}.kl_loss_coef", coefficient, f"{ACTOR}.kl_loss_type", kind)
        t.put("loss_fn.reference_policy_kl_gradient", "estimate", f"{ACTOR}.kl_loss_type")
    elif in_reward:
        if t.get("algorithm.kl_ctrl.type") != "fixed":
            t.lacks("algorithm.kl_ctrl.type", t.get("algorithm.kl_ctrl.type"), "an adaptive KL penalty", "fixed")
        if algorithm == "grpo" and t.get("algorithm.adv_estimator") != "reinforce_plus_plus":
            feature = f"a KL penalty in the reward with adv_estimator={t.get('algorithm.adv_estimator')}"
            t.lacks("algorithm.use_kl_in_reward", True, feature, f"false, and {ACTOR}.use_kl_loss=true")
            return
        _penalty(
            t,
            "algorithm.kl_ctrl.kl_coef",
            t.get("algorithm.kl_ctrl.kl_coef"),
            "algorithm.kl_penalty",
            t.get("algorithm.kl_penalty"),
        )
        t.put("loss_fn.use_kl_in_reward", True, "algorithm.use_kl_in_reward")


def _penalty(t: Translator, coefficient_key: str, coefficient: object, kind_key: str, kind: Any) -> None:
    """Translate the weight and the estimator of a KL penalty. verl bounds only k3, by the same values as ours."""
    base = str(kind).removesuffix("+")
    if base not in KL_TYPES:
        t.lacks(kind_key, kind, "this estimator of the KL divergence", f"one of: {', '.join(KL_TYPES)}")
        return
    ours = KL_TYPES[base]
    if kind_key.startswith(ACTOR):
        if str(kind).endswith("+") and ours != "k2":  # the value of `base`, the gradient of k2
            t.change(f"{kind_key}={kind}", f"the metric reference_kl is k2's, whose gradient {kind} has")
            ours = "k2"
        elif ours == "k1":
            t.lacks(kind_key, kind, "k1 in the loss, whose gradient is 0 on average", "low_var_kl, or k1+")
            return
    t.put("loss_fn.reference_policy_kl_penalty", coefficient, coefficient_key)
    t.put("loss_fn.reference_policy_kl_type", ours, kind_key)
    for bound, value in (("input", 20.0), ("output", 10.0)):
        t.put(f"loss_fn.kl_{bound}_clamp_value", value if ours == "k3" else None, kind_key)


def _correction(t: Translator) -> None:
    """Translate the correction for the difference between the engines' log-probs and the train ranks'."""
    key = "algorithm.rollout_correction"
    weights, bound = t.get(f"{key}.rollout_is"), t.get(f"{key}.rollout_is_threshold")
    if t.get(f"{key}.bypass_mode") is True:
        if t.get(f"{key}.loss_type") != "ppo_clip":
            t.lacks(f"{key}.loss_type", t.get(f"{key}.loss_type"), "REINFORCE on the engines' log-probs", "ppo_clip")
        t.put("loss_fn.use_generation_logprobs", True, f"{key}.bypass_mode")
        return  # the ratio is the correction; rollout_is then has no effect on it
    if weights is None:
        return
    ours = (
        "sequence" if t.get_layer("loss_fn.sequence_level_importance_ratios") else "token"
    )  # with GSPO, ours are of sequences
    if weights != ours:
        t.lacks(f"{key}.rollout_is", weights, f"importance weights of {weights}s with this loss", ours)
        return
    t.put("loss_fn.use_importance_sampling_correction", True, f"{key}.rollout_is")
    if isinstance(bound, str):
        t.lacks(f"{key}.rollout_is_threshold", bound, "weights outside of two bounds", "a number, the upper bound")
        return
    t.put("loss_fn.truncated_importance_sampling_type", "tis", f"{key}.rollout_is")
    t.put("loss_fn.truncated_importance_sampling_ratio", bound, f"{key}.rollout_is_threshold")


def _groups(t: Translator, algorithm: str) -> None:
    """Translate DAPO's dynamic sampling."""
    key = "algorithm.filter_groups"
    generated, trained = t.consume("data.gen_batch_size"), t.get("data.train_batch_size")
    if not t.on(f"{key}.enable"):
        return
    most = t.get(f"{key}.max_num_gen_batches") or UNBOUNDED
    t.put(f"{algorithm}.use_dynamic_sampling", True, f"{key}.enable")
    t.put(f"{algorithm}.dynamic_sampling_max_gen_batches", most, f"{key}.max_num_gen_batches")
    t.change(f"{key}.metric", "groups are kept if their rewards vary, whatever metric is named")
    if generated and trained and generated > trained:
        t.put(f"{algorithm}.batch_multiplier", generated / trained, "data.gen_batch_size")
