"""Losses of GRPO, PPO (policy and critic) and SFT. Each formula cites its paper and equation.

With r = pi / pi_old and w = pi_old / pi_generate for each token, A its advantage and sg() a stopped gradient:

    loss = - w S + reference_policy_kl_penalty KL + drift_penalty log^2 r - entropy_coeff H        `policy_loss`
    S    = min(r A, clip(r) A)                  PPO, GRPO, DAPO, GSPO      `clipped_surrogate`
         | sg(clip(r)) A log pi                 CISPO                      `cispo`
         | 4 / tau sigma(tau (r - 1)) A         SAPO                       `sapo`
         | keep(pi - pi_old) r A                DPPO                       `dppo`
         | A log pi                             REINFORCE, RLOO

S, KL and log^2 r are averaged over all tokens of the step (token_level_loss=true), or within each sequence and then over
sequences. H is the exact entropy of a token's distribution and is always averaged over all tokens.

In a step with one update pi_old equals pi, and needs no forward pass of its own. force_on_policy_ratio assumes this for any
step. The ratio is then 1, and its gradient is that of log pi. With use_generation_logprobs pi_old is pi_generate, which needs
no forward pass either: r = pi / pi_generate is exact for tokens that pi_generate drew, and w is 1. (As verl's
rollout_correction.bypass_mode.)

If top_p or top_k truncates sampling, pi is the truncated distribution from which tokens are drawn. A drawn token may still be
outside of it: train and generate ranks round differently, and the policy changes within a step. pi or pi_old is then 0. Such
tokens have no part in S and in the metrics of the ratio; `excluded_fraction` is their share. They still count in the divisor,
the number of tokens of the step. NeMo-RL sets pi = 1 for them, which has no gradient either but enters ratios of sequences and
the metrics. KL compares whole distributions, as in NeMo-RL, because the reference policy would truncate to other tokens.

Not supported: VAPO's loss on right answers, PPO's penalty on KL(pi_old || pi) (eq. 8), CISPO's masks on
tokens (eq. 7), the exact KL over the vocabulary, masks by a sequence's worst token, losses on a distribution of values.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import softplus

from pipeline.algorithms.reductions import (
    apply_mask,
    histogram_share,
    mask_impossible_tokens,
    masked_extreme,
    masked_share,
    per_token,
    sequence_means,
    sequence_sums,
    values_before,
)
from pipeline.algorithms.sections import LossConfig, ValueLossConfig
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch


def policy_loss(config: LossConfig, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
    """Return this batch's share of the policy's loss and of its metrics."""
    assert outputs.logprobs is not None
    logprobs, current = outputs.logprobs, outputs.logprobs.detach()
    old = current if batch.old_logprobs is None or config.force_on_policy_ratio else batch.old_logprobs
    whole_batch, full, compared = batch, outputs.full_logprobs, old
    if config.use_generation_logprobs:
        old, compared = batch.generate_logprobs, current
    if full is not None:  # sampling is truncated
        batch = mask_impossible_tokens(whole_batch, current, old)
        compared = torch.where(compared == -torch.inf, whole_batch.generate_logprobs, compared)
    log_ratio = apply_mask(logprobs - old, batch)
    if config.sequence_level_importance_ratios:
        log_ratio = sequence_log_ratios(log_ratio.detach(), batch) + apply_mask(logprobs - current, batch)
    ratio = torch.exp(log_ratio)
    surrogate, bounded = _surrogate(config, apply_mask(logprobs, batch), apply_mask(old, batch), ratio, batch.advantages)
    log_weights = importance_log_weights(old, batch, config)
    weights, outside = truncate_weights(log_weights, batch, config)
    if config.use_importance_sampling_correction:
        surrogate = surrogate * weights
    loss = masked_share(-surrogate, batch, counts, config.token_level_loss)
    if config.drift_penalty != 0:
        drift = apply_mask(logprobs - old, batch).square()
        loss = loss + config.drift_penalty * masked_share(drift, batch, counts, config.token_level_loss)
    with torch.no_grad():
        metrics = {
            "ppo_kl": masked_share(old - current, batch, counts),
            "clip_fraction": masked_share(bounded.to(ratio.dtype), batch, counts),
            "ratio_max": masked_extreme(ratio, batch, largest=True),
            "ratio_min": masked_extreme(ratio, batch, largest=False),
            "approx_entropy": masked_share(-torch.exp(current - batch.generate_logprobs) * current, batch, counts),
            **mismatch_metrics(compared, whole_batch, counts),
            **_weight_metrics(log_weights, outside, batch, counts, config),
        }
        if full is not None:
            excluded = whole_batch.loss_mask & ~batch.loss_mask
            metrics["excluded_fraction"] = masked_share(excluded.to(ratio.dtype), whole_batch, counts)
    if whole_batch.reference_logprobs is not None:
        kl = kl_in_loss(logprobs if full is None else full, whole_batch, config)
        kl = masked_share(kl, whole_batch, counts, config.token_level_loss)
        metrics["reference_kl"] = kl.detach()
        if not config.use_kl_in_reward:
            loss = loss + config.reference_policy_kl_penalty * kl
    if outputs.entropy is not None:
        entropy = masked_share(outputs.entropy, whole_batch, counts)
        metrics["entropy"] = entropy.detach()
        if config.entropy_coeff != 0:
            loss = loss - config.entropy_coeff * entropy
    return LossOutput(loss, metrics)


# ---- surrogates -----------------------------------------------------------------------------------------------------------


def _surrogate(
    config: LossConfig, logprobs: torch.Tensor, old: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (surrogate objective, which the loss negates; whether a bound on the ratio is active), `[T]` each."""
    if config.disable_ppo_ratio:
        return advantages * logprobs, torch.zeros_like(ratio, dtype=torch.bool)
    if config.use_cispo:
        return cispo(config, logprobs, ratio, advantages)
    if config.use_sapo:
        return sapo(config, ratio, advantages), torch.zeros_like(ratio, dtype=torch.bool)
    if config.use_dppo:
        return dppo(config, logprobs, old, ratio, advantages)
    return clipped_surrogate(config, ratio, advantages)


def clipped_surrogate(config: LossConfig, ratio: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (PPO's clipped surrogate, whether a bound is active), `[T]` each (https://arxiv.org/abs/1707.06347 eq. 7).

        min(r A, clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max) A)

    A token with an active bound has no gradient. Different bounds are DAPO's clip-higher (https://arxiv.org/abs/2503.14476 eq.
    10). With ratio_clip_c = c (dual clip, https://arxiv.org/abs/1912.09729 eq. 5) the surrogate is at least c A where A < 0, so
    that a bad token that became far more likely does not outweigh all others.
    """
    low, high, c = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max, config.ratio_clip_c
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    bounded = (ratio > high) & (advantages > 0) | (ratio < low) & (advantages < 0)
    if c is None:
        return surrogate, bounded
    dual = torch.where(advantages < 0, torch.maximum(surrogate, c * advantages), surrogate)
    return dual, bounded | (ratio > c) & (advantages < 0)


def cispo(
    config: LossConfig, logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (CISPO's surrogate, whether a bound is active), `[T]` each (MiniMax-M1, https://arxiv.org/abs/2506.13585 eq. 4).

        sg(clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max)) A log pi

    A bound limits a token's gradient, but never removes it. ratio_clip_min=1 gives the paper's loss, without a lower bound.
    """
    low, high = 1 - config.ratio_clip_min, 1 + config.ratio_clip_max
    return ratio.detach().clamp(low, high) * advantages * logprobs, (ratio > high) | (ratio < low)


def sapo(config: LossConfig, ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return SAPO's surrogate, `[T]` (https://arxiv.org/abs/2511.20347 eq. 6 and 7).

        4 / tau sigma(tau (r - 1)) A,     tau: sapo_temperature_positive where A > 0, else sapo_temperature_negative

    The gradient at r = 1 is that of r A, and falls smoothly as r departs from 1. The paper averages over the tokens of each
    sequence, then over sequences: token_level_loss=false.
    """
    positive, negative = config.sapo_temperature_positive, config.sapo_temperature_negative
    temperature = torch.full_like(ratio, negative).masked_fill(advantages > 0, positive)
    return 4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantages


def dppo(
    config: LossConfig, logprobs: torch.Tensor, old: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (DPPO's surrogate, whether a token is left out), `[T]` each (https://arxiv.org/abs/2602.04879, binary TV).

        r A,  0 where A > 0 and pi - pi_old > ratio_clip_max,  or A < 0 and pi_old - pi > ratio_clip_min

    A bound on the probability, not on the ratio, lets improbable tokens change.
    """
    change = torch.exp(logprobs.detach()) - torch.exp(old)
    outside = (advantages > 0) & (change > config.ratio_clip_max) | (advantages < 0) & (change < -config.ratio_clip_min)
    return torch.where(outside, 0.0, ratio * advantages), outside


def sequence_log_ratios(log_ratios: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return log s of each token's sequence, `[T]`, from `[T]` log r (GSPO, https://arxiv.org/abs/2507.18071 eq. 7).

        s_i = (pi(y_i) / pi_old(y_i))^(1/|y_i|) = exp(1/|y_i| sum_t log r_t)

    s_i replaces the ratio of every token in the clipped surrogate (eq. 5), so a sequence is clipped as a whole. The loss is a
    mean over sequences: token_level_loss=false. `policy_loss` uses GSPO-token's ratio s_it = sg(s_i) pi_t / sg(pi_t) (eq. 14),
    whose value is s_i and whose gradient is that of the token's log pi. If all tokens of a sequence have the same advantage,
    value and gradient are GSPO's. GSPO-token also allows a separate advantage for each token, as PPO has (eq. 13).
    """
    return per_token(sequence_means(log_ratios, batch), batch)


# ---- KL divergence from the reference --------------------------------------------------------------------------------------


def estimate_kl(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    kind: str,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimate KL(pi || reference) at each token drawn from pi, times `weight`: `[T]`.

    With x = log pi_ref - log pi:

        k1 = -x        k2 = x^2 / 2        k3 = exp(x) - 1 - x        Schulman, http://joschu.net/blog/kl-approx.html

    input_clamp bounds |x|, and output_clamp the absolute value of the product with `weight`, as in NeMo-RL. Beyond a bound
    there is no gradient.
    """
    x = reference - logprobs
    if input_clamp is not None:
        if weight is not None:
            weight = torch.where(x.abs() <= input_clamp, weight, weight.detach())
        x = x.clamp(-input_clamp, input_clamp)
    if kind == "k1":
        kl = -x
    elif kind == "k2":
        kl = x.square() / 2
    elif kind == "k3":
        kl = torch.exp(x) - 1 - x
    else:
        raise ValueError(f"unknown KL estimate '{kind}'")
    if weight is not None:
        kl = weight * kl
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


def kl_in_loss(logprobs: torch.Tensor, batch: PackedBatch, config: LossConfig) -> torch.Tensor:
    """Return the KL that reference_policy_kl_penalty multiplies in the loss: `[T]`, 0 where the mask is False.

    The gradient of KL(pi || pi_ref) has a term from the distribution from which tokens are drawn. So we multiply the estimate
    by exp(log pi - sg(log pi)), which is 1 and has the score function grad log pi as its gradient
    (https://arxiv.org/abs/2506.09477). With use_on_policy_kl_approximation the factor is pi / pi_generate, which also corrects
    for tokens drawn by another policy.

    With reference_policy_kl_gradient=estimate there is no factor, as in the GRPO paper (https://arxiv.org/abs/2402.03300 eq.
    21) and in TRL. The value is the same. The gradient of k3 is then (1 - pi_ref / pi) times the score function. In expectation
    this is the gradient of KL(pi_ref || pi), not of the penalty.
    """
    if config.reference_policy_kl_gradient == "estimate":
        return _kl_of_counted(logprobs, batch, config, weight=None)
    drawn_from = batch.generate_logprobs if config.use_on_policy_kl_approximation else logprobs.detach()
    return _kl_of_counted(logprobs, batch, config, torch.exp(apply_mask(logprobs - drawn_from, batch)))


def kl_in_reward(batch: PackedBatch, config: LossConfig) -> torch.Tensor:
    """Return KL(pi_old || pi_ref) of the policy before the step's first update, `[T]`, 0 where the mask is False."""
    old = batch.old_logprobs if batch.old_full_logprobs is None else batch.old_full_logprobs
    assert old is not None
    return _kl_of_counted(old, batch, config, weight=None)


def _kl_of_counted(logprobs: torch.Tensor, batch: PackedBatch, config: LossConfig, weight: torch.Tensor | None) -> torch.Tensor:
    assert batch.reference_logprobs is not None
    kl = estimate_kl(
        apply_mask(logprobs, batch),
        apply_mask(batch.reference_logprobs, batch),
        config.reference_policy_kl_type,
        config.kl_input_clamp_value,
        config.kl_output_clamp_value,
        weight,
    )
    return apply_mask(kl, batch)


# ---- importance sampling: generate and train ranks compute different log-probs for the same weights ------------------------


def importance_log_weights(old: torch.Tensor, batch: PackedBatch, config: LossConfig) -> torch.Tensor:
    """Return log w of w_t = pi_old(y_t) / pi_generate(y_t), `[T]` (https://fengyao.notion.site/off-policy-rl).

    log w is 0 where the mask is False. With sequence_level_importance_ratios, or sequence_level_importance_weights, all tokens
    of a sequence have the product of its w_t.
    """
    log_weights = apply_mask(old - batch.generate_logprobs, batch)
    if config.sequence_level_importance_ratios or config.sequence_level_importance_weights:
        return per_token(sequence_sums(log_weights, batch), batch)
    return log_weights


def truncate_weights(log_weights: torch.Tensor, batch: PackedBatch, config: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (w truncated to the bounds [ratio_min or 0, ratio], `[T]`; whether w was out of bounds, `[T]` bool).

    tis            w clamped to the bounds
    icepop         w, but 0 outside of the bounds (https://ringtech.notion.site/icepop)
    seq-mask-tis   w, but 0 in sequences whose geometric mean of w is outside of the bounds
        (https://yingru.notion.site/When-Speed-Kills-Stability-Demystifying-RL-Collapse-from-the-Training-Inference-Mismatch)
    """
    weights = torch.exp(log_weights)
    kind, high = config.truncated_importance_sampling_type, config.truncated_importance_sampling_ratio
    low = config.truncated_importance_sampling_ratio_min or 0.0
    if kind is None:
        return weights, torch.zeros_like(batch.loss_mask)
    assert high is not None  # `RewardedAlgorithm.problems`
    compared = weights
    if kind == "seq-mask-tis":
        compared = per_token(torch.exp(sequence_means(log_weights, batch)), batch)
    outside = (compared < low) | (compared > high)
    if kind == "tis":
        return weights.clamp(low, high), outside
    return torch.where(outside, 0.0, weights), outside


def mask_mismatched_sequences(batch: PackedBatch, threshold: float) -> torch.Tensor:
    """Return the mask without sequences whose mean of exp|log pi_old - log pi_generate| is above the threshold, `[T]` bool.

    The counts by which losses divide do not include these sequences. The mean leaves out tokens that truncated sampling
    excludes.
    """
    assert batch.old_logprobs is not None
    compared = batch if batch.old_full_logprobs is None else mask_impossible_tokens(batch, batch.old_logprobs)
    return batch.loss_mask & (per_token(_sequence_errors(batch.old_logprobs, compared), batch) <= threshold)


def mismatch_metrics(old: torch.Tensor, batch: PackedBatch, counts: GlobalCounts) -> dict[str, torch.Tensor]:
    """Return metrics of the difference between the log-probs of generate and train ranks, with NeMo-RL's names.

    With p = pi_generate and q = pi_old:

    token_mult_prob_error: mean of exp|log p - log q|. seq_mult_prob_error_max, _min: largest and smallest of the sequences'
    means of exp|log p - log q|. gen_logprob_error_max: largest |log p - log q|.
    gen_kl_error, policy_kl_error: k3 estimates of KL(p || q) and KL(q || p).
    js_divergence_error: estimate of the Jensen-Shannon divergence, the mean of (w log w - (1 + w) log((1 + w) / 2)) / 2 with
    w = q / p, which is unbiased for tokens drawn from p. NeMo-RL's estimate is equal to second order in log w.
    """
    generate, old = apply_mask(batch.generate_logprobs, batch), apply_mask(old, batch)
    log_weights = old - generate
    weights = torch.exp(log_weights)
    jensen_shannon = (weights * log_weights - (1 + weights) * (softplus(log_weights) - math.log(2))) / 2
    errors = per_token(_sequence_errors(old, batch), batch)
    return {
        "token_mult_prob_error": masked_share(torch.exp((generate - old).abs()), batch, counts),
        "seq_mult_prob_error_max": masked_extreme(errors, batch, largest=True),
        "seq_mult_prob_error_min": masked_extreme(errors, batch, largest=False),
        "gen_logprob_error_max": masked_extreme((generate - old).abs(), batch, largest=True),
        "gen_kl_error": masked_share(estimate_kl(generate, old, "k3"), batch, counts),
        "policy_kl_error": masked_share(estimate_kl(old, generate, "k3"), batch, counts),
        "js_divergence_error": masked_share(jensen_shannon, batch, counts),
    }


def _weight_metrics(
    log_weights: torch.Tensor, outside: torch.Tensor, batch: PackedBatch, counts: GlobalCounts, config: LossConfig
) -> dict[str, torch.Tensor]:
    """Return metrics: mean and histogram of w before truncation, and the share of tokens or sequences out of bounds."""
    sequences = config.sequence_level_importance_ratios or config.sequence_level_importance_weights
    metrics = {
        "sampling_importance_ratio": masked_share(torch.exp(log_weights), batch, counts, token_level=not sequences),
        "sampling_importance_ratio_histogram": histogram_share(log_weights, batch, counts),
    }
    if config.truncated_importance_sampling_type is not None:
        sequences = sequences or config.truncated_importance_sampling_type == "seq-mask-tis"
        metrics["is_oob_ratio"] = masked_share(outside.to(log_weights.dtype), batch, counts, token_level=not sequences)
    return metrics


def _sequence_errors(old: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return each sequence's mean of exp|log pi_old - log pi_generate| over counted tokens, `[S]`."""
    return sequence_means(torch.exp(apply_mask(old - batch.generate_logprobs, batch).abs()), batch)


# ---- other losses -----------------------------------------------------------------------------------------------------------


def sft_loss(outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
    """Return this batch's share of the mean negative log-likelihood, - sum_t mask_t log pi(y_t | y_<t) / sum_t mask_t."""
    assert outputs.logprobs is not None
    return LossOutput(masked_share(-outputs.logprobs, batch, counts), {})


def value_loss(config: ValueLossConfig, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
    """Return this batch's share of the critic's loss (https://arxiv.org/abs/2005.12729 sec. 3) and of its metrics.

        loss = scale / 2 mean over tokens of max((V - R)^2, (clip(V, V_old - cliprange, V_old + cliprange) - R)^2)

    V, V_old and the return R of a counted token are those of the text before it, so V is the value head's output at the token
    before it.
    """
    assert outputs.values is not None and batch.old_values is not None and batch.returns is not None
    values, returns = values_before(outputs.values), batch.returns
    errors = (values - returns).square()
    is_clipped = torch.zeros_like(batch.loss_mask)
    if (most := config.cliprange) is not None:
        old = values_before(batch.old_values)
        clipped = (old + (values - old).clamp(-most, most) - returns).square()
        is_clipped = clipped > errors
        errors = torch.maximum(errors, clipped)
    loss = config.scale / 2 * masked_share(errors, batch, counts)
    with torch.no_grad():
        predictions = apply_mask(values, batch)
        residuals = returns - predictions
        terms = torch.stack([returns, returns.square(), residuals, residuals.square()])
        metrics = {
            "values_mean": masked_share(predictions, batch, counts),
            "values_max": masked_extreme(predictions, batch, largest=True),
            "values_min": masked_extreme(predictions, batch, largest=False),
            "returns_mean": masked_share(returns, batch, counts),
            "value_clip_fraction": masked_share(is_clipped.to(predictions.dtype), batch, counts),
            "explained_variance_moments": torch.stack([masked_share(term, batch, counts) for term in terms]),
        }
    return LossOutput(loss, metrics)
