"""GRPO: group-relative policy optimization (https://arxiv.org/abs/2402.03300), with what later papers changed about it.

For each token t of completion i of a prompt, with r = pi(y_t) / pi_old(y_t) and w = pi_old(y_t) / pi_generate(y_t):

    loss = - w min(r A_i, clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max) A_i) + reference_policy_kl_penalty KL(pi || pi_ref)

averaged over all tokens of the step (token_level_loss, DAPO https://arxiv.org/abs/2503.14476) or within each sequence first
(the GRPO paper). A_i is `group_advantages`. Clipping up and down by different amounts is DAPO's clip-higher. w corrects for
the generate ranks' own numerics (https://fengyao.notion.site/off-policy-rl), clamped from above by
truncated_importance_sampling_ratio; without use_importance_sampling_correction it is 1. When one update uses the whole
rollout, pi_old is pi itself, so its log-probs need no forward of their own.

KL is Schulman's estimate k1, k2 or k3 (http://joschu.net/blog/kl-approx.html). Its tokens are drawn from the policy that is
differentiated, so it carries the factor exp(log pi - sg(log pi)): 1 in value, and the score-function term in the gradient
(https://arxiv.org/abs/2506.09477).

Left out: dynamic sampling, sequence-level ratios, dual clip, reward shaping, KL in the reward.
"""

from __future__ import annotations

import numpy as np
import torch

from pipeline.algorithms.advantages import group_advantages
from pipeline.algorithms.base import Needs
from pipeline.algorithms.reductions import masked_extreme, masked_share
from pipeline.config import GRPOConfig, LossConfig
from pipeline.types import GlobalCounts, LossOutput, PackedBatch, Prompt, Rollout, RolloutGroup, Sample


class GRPO:
    def __init__(self, grpo: GRPOConfig, loss: LossConfig, updates_per_step: int):
        self._grpo = grpo
        self._loss = loss
        self.needs = Needs(old=updates_per_step > 1, reference=loss.reference_policy_kl_penalty != 0)

    def credit(self, groups: list[RolloutGroup]) -> list[Sample]:
        samples = []
        for group in groups:
            rewards = np.array([rollout.reward for rollout in group.rollouts])
            advantages = group_advantages(rewards, self._grpo.use_leave_one_out_baseline, self._grpo.normalize_rewards)
            samples += [_sample(group.prompt, rollout, a) for rollout, a in zip(group.rollouts, advantages, strict=True)]
        return samples

    def loss(self, logprobs: torch.Tensor, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        config = self._loss
        current = logprobs.detach()
        old = current if batch.old_logprobs is None else batch.old_logprobs
        ratio = torch.exp(logprobs - old)
        clipped = ratio.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
        surrogate = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
        weight = torch.exp(old - batch.generate_logprobs)
        if config.use_importance_sampling_correction:
            bound = config.truncated_importance_sampling_ratio
            surrogate = surrogate * (weight if bound is None else weight.clamp(max=bound))
        loss = masked_share(-surrogate, batch, counts, config.token_level_loss)
        with torch.no_grad():
            metrics = {
                "ppo_kl": masked_share(old - current, batch, counts),
                "clip_fraction": masked_share(is_clipped(ratio, batch.advantages, config).float(), batch, counts),
                "ratio_max": masked_extreme(ratio, batch, largest=True),
                "ratio_min": masked_extreme(ratio, batch, largest=False),
                "sampling_importance_ratio": masked_share(weight, batch, counts),
                "token_mult_prob_error": masked_share(torch.exp((batch.generate_logprobs - old).abs()), batch, counts),
                "gen_logprob_error_max": masked_extreme((batch.generate_logprobs - old).abs(), batch, largest=True),
                "gen_kl_error": masked_share(estimate_kl(batch.generate_logprobs, old, "k3"), batch, counts),
                "approx_entropy": masked_share(-torch.exp(current - batch.generate_logprobs) * current, batch, counts),
            }
        if batch.reference_logprobs is not None:
            kl = estimate_kl(
                logprobs,
                batch.reference_logprobs,
                config.reference_policy_kl_type,
                config.kl_input_clamp_value,
                config.kl_output_clamp_value,
            )
            kl = masked_share(kl * torch.exp(logprobs - current), batch, counts, config.token_level_loss)
            loss = loss + config.reference_policy_kl_penalty * kl
            metrics["reference_kl"] = kl.detach()
        return LossOutput(loss, metrics)


def is_clipped(ratio: torch.Tensor, advantages: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """`[T]` bool: where the clipped branch is the smaller one, so the token has no gradient."""
    above = (ratio > 1 + config.ratio_clip_max) & (advantages > 0)
    below = (ratio < 1 - config.ratio_clip_min) & (advantages < 0)
    return above | below


def estimate_kl(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    kind: str,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> torch.Tensor:
    """Estimate of KL(pi || reference) at each token drawn from pi, `[T]`: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - 1 - x, with
    x = log reference - log pi. The clamps bound x, and the estimate, to plus or minus their value."""
    x = reference - logprobs
    if input_clamp is not None:
        x = x.clamp(-input_clamp, input_clamp)
    if kind == "k1":
        kl = -x
    elif kind == "k2":
        kl = x.square() / 2
    elif kind == "k3":
        kl = torch.exp(x) - 1 - x
    else:
        raise ValueError(f"unknown KL estimate '{kind}'")
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)


def _sample(prompt: Prompt, rollout: Rollout, advantage: float) -> Sample:
    completion = rollout.completion
    before = len(prompt.tokens)
    tokens = np.concatenate([prompt.tokens, completion.tokens]).astype(np.int32)
    loss_mask = np.arange(len(tokens)) >= before
    logprobs = np.concatenate([np.zeros(before, np.float32), completion.logprobs]).astype(np.float32)
    return Sample(tokens, loss_mask, logprobs, np.where(loss_mask, np.float32(advantage), np.float32(0)))
