"""Importance sampling between the ranks that generate and those that train, which differ in the log-probs they find for the
same weights (https://fengyao.notion.site/off-policy-rl).

    w_t = pi_old(y_t) / pi_generate(y_t)

weighs each token's surrogate (use_importance_sampling_correction); with sequence_level_importance_ratios it is the product over
the sequence. truncated_importance_sampling_type bounds it, from [ratio_min or 0] to [ratio]:

    tis            w clamped to the bounds
    icepop         0 outside of them (https://ringtech.notion.site/icepop)
    seq-mask-tis   0 in sequences whose geometric mean of w is outside of them
                   (https://yingru.notion.site/When-Speed-Kills-Stability-Demystifying-RL-Collapse-from-the-Training-Inference-Mismatch)

seq_logprob_error_threshold leaves sequences out for good, before anything is divided by a count: those whose mean of
exp|log pi_old - log pi_generate| is above it.

Metrics, over counted tokens, with names of NeMo-RL: `mismatch_metrics`. Left out: masks by a sequence's worst token.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import softplus

from pipeline.algorithms.kl import estimate_kl
from pipeline.algorithms.reductions import (
    counted,
    histogram_share,
    masked_extreme,
    masked_share,
    per_token,
    possible,
    sequence_means,
    sequence_sums,
)
from pipeline.config import LossConfig
from pipeline.types import GlobalCounts, PackedBatch


def importance_log_weights(old: torch.Tensor, batch: PackedBatch, config: LossConfig) -> torch.Tensor:
    """log w, `[T]`: 0 where the mask is False, but that a sequence's is at all of its tokens."""
    log_weights = counted(old - batch.generate_logprobs, batch)
    if config.sequence_level_importance_ratios:
        return per_token(sequence_sums(log_weights, batch), batch)
    return log_weights


def truncated(log_weights: torch.Tensor, batch: PackedBatch, config: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights `[T]`, where w was out of bounds `[T]` bool)."""
    weights = torch.exp(log_weights)
    kind, high = config.truncated_importance_sampling_type, config.truncated_importance_sampling_ratio
    low = config.truncated_importance_sampling_ratio_min or 0.0
    if kind is None:
        return weights, torch.zeros_like(batch.loss_mask)
    judged = weights
    if kind == "seq-mask-tis":
        judged = per_token(torch.exp(sequence_means(log_weights, batch)), batch)
    outside = (judged < low) | (judged > high)
    if kind == "tis":
        return weights.clamp(low, high), outside
    return torch.where(outside, 0.0, weights), outside


def trusted(batch: PackedBatch, threshold: float) -> torch.Tensor:
    """`[T]` bool: the mask without the sequences whose log-probs differ too much, tokens apart that truncation cuts away."""
    judged = batch if batch.old_full_logprobs is None else possible(batch, batch.old_logprobs)
    return batch.loss_mask & (per_token(_sequence_errors(batch.old_logprobs, judged), batch) <= threshold)


def mismatch_metrics(old: torch.Tensor, batch: PackedBatch, counts: GlobalCounts) -> dict[str, torch.Tensor]:
    """How far the log-probs of generate and train ranks are apart, with p = pi_generate, q = pi_old:

    token_mult_prob_error: mean of exp|log p - log q|; seq_mult_prob_error: of a sequence, the largest and smallest.
    gen_kl_error, policy_kl_error: k3 estimates of KL(p || q) and KL(q || p).
    js_divergence_error: of the Jensen-Shannon divergence, the mean of (w log w - (1 + w) log((1 + w) / 2)) / 2, w = q / p,
    which is unbiased for tokens drawn from p. NeMo-RL's estimate is the same to second order in log w.
    """
    generate, old = counted(batch.generate_logprobs, batch), counted(old, batch)
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


def weight_metrics(
    log_weights: torch.Tensor, outside: torch.Tensor, batch: PackedBatch, counts: GlobalCounts, config: LossConfig
) -> dict[str, torch.Tensor]:
    """Of w before it is truncated: mean and quantiles; and how many were out of bounds, of tokens or of sequences."""
    sequences = config.sequence_level_importance_ratios
    metrics = {
        "sampling_importance_ratio": masked_share(torch.exp(log_weights), batch, counts, token_level=not sequences),
        "sampling_importance_ratio_histogram": histogram_share(log_weights, batch, counts),
    }
    if config.truncated_importance_sampling_type is not None:
        sequences = sequences or config.truncated_importance_sampling_type == "seq-mask-tis"
        metrics["is_oob_ratio"] = masked_share(outside.to(log_weights.dtype), batch, counts, token_level=not sequences)
    return metrics


def _sequence_errors(old: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """`[S]`: the mean of exp|log pi_old - log pi_generate| over counted tokens."""
    return sequence_means(torch.exp(counted(old - batch.generate_logprobs, batch).abs()), batch)
