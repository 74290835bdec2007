"""The policy's loss of GRPO and PPO, put together from its parts.

With r = pi / pi_old and w = pi_old / pi_generate for each token, and A its advantage:

    loss = - w min(r A, clip(r) A)                  surrogate.py; r of a whole sequence: gspo.py
           + reference_policy_kl_penalty KL         kl.py, unless it is in the reward
           - entropy_coeff H                        H: the exact entropy of the token's distribution
    in place of the first line - w A log pi         rloo.py, with disable_ppo_ratio
                               - w sg(clip(r)) A log pi      cispo.py, with use_cispo

w and its bounds are importance_sampling.py's; without use_importance_sampling_correction it is 1. The first two lines are
averaged over all tokens of the step (token_level_loss), or within each sequence first; the entropy always over all tokens.

Where a step has one update, pi_old is pi itself, so that its log-probs need no forward pass of their own; force_on_policy_ratio
says so of any step. The ratio is then 1 and has the gradient of log pi.

Where sampling is truncated (top_p, top_k), pi is what that leaves of the policy, as tokens were drawn. One that was drawn may
yet lie outside: the ranks compute a little differently, and the policy moves within a step. There pi or pi_old, and with it
w r, is 0, so that the token has no part in the first line, nor in metrics but excluded_fraction, which says how many there are.
(They still count among all tokens of the step.) NeMo-RL gives them pi = 1, which has no gradient either, but enters ratios of
sequences and the metrics. KL is of whole distributions, as in NeMo-RL: what the reference would cut away is another set.

Left out: VAPO's loss on right answers, masks on sequences that have become unlikely, other clips than these.
"""

from __future__ import annotations

import torch

from pipeline.algorithms.cispo import cispo, is_bounded
from pipeline.algorithms.gspo import sequence_log_ratios
from pipeline.algorithms.importance_sampling import importance_log_weights, mismatch_metrics, truncated, weight_metrics
from pipeline.algorithms.kl import kl_in_loss
from pipeline.algorithms.reductions import counted, masked_extreme, masked_share, possible
from pipeline.algorithms.rloo import reinforce
from pipeline.algorithms.surrogate import clipped_surrogate, is_clipped
from pipeline.config import LossConfig
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch


class PolicyLoss:
    def __init__(self, config: LossConfig):
        self._config = config

    def __call__(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        config, logprobs = self._config, outputs.logprobs
        current = logprobs.detach()
        on_policy = batch.old_logprobs is None or config.force_on_policy_ratio
        old = current if on_policy else batch.old_logprobs
        whole, cut = batch, outputs.full_logprobs is not None
        if cut:
            batch = possible(whole, current, old)
            seen = torch.where(old == -torch.inf, whole.generate_logprobs, old)
        log_ratio = counted(logprobs - old, batch)
        if config.sequence_level_importance_ratios:
            log_ratio = sequence_log_ratios(log_ratio, batch)
        ratio = torch.exp(log_ratio)
        surrogate, bound = self._surrogate(counted(logprobs, batch), ratio, batch.advantages)
        log_weights = importance_log_weights(old, batch, config)
        weights, outside = truncated(log_weights, batch, config)
        if config.use_importance_sampling_correction:
            surrogate = surrogate * weights
        loss = masked_share(-surrogate, batch, counts, config.token_level_loss)
        with torch.no_grad():
            metrics = {
                "ppo_kl": masked_share(old - current, batch, counts),
                "clip_fraction": masked_share(bound.to(ratio.dtype), batch, counts),
                "ratio_max": masked_extreme(ratio, batch, largest=True),
                "ratio_min": masked_extreme(ratio, batch, largest=False),
                "approx_entropy": masked_share(-torch.exp(current - batch.generate_logprobs) * current, batch, counts),
                **mismatch_metrics(seen if cut else old, whole, counts),
                **weight_metrics(log_weights, outside, batch, counts, config),
            }
            if cut:
                excluded = whole.loss_mask & ~batch.loss_mask
                metrics["excluded_fraction"] = masked_share(excluded.to(ratio.dtype), whole, counts)
        if whole.reference_logprobs is not None:
            kl = kl_in_loss(outputs.full_logprobs if cut else logprobs, whole, config)
            kl = masked_share(kl, whole, counts, config.token_level_loss)
            metrics["reference_kl"] = kl.detach()
            if not config.use_kl_in_reward:
                loss = loss + config.reference_policy_kl_penalty * kl
        if outputs.entropy is not None:
            entropy = masked_share(outputs.entropy, whole, counts)
            metrics["entropy"] = entropy.detach()
            if config.entropy_coeff != 0:
                loss = loss - config.entropy_coeff * entropy
        return LossOutput(loss, metrics)

    def _surrogate(
        self, logprobs: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the loss makes larger, where a bound on the ratio was at work), `[T]` each."""
        if self._config.disable_ppo_ratio:
            return reinforce(logprobs, advantages), torch.zeros_like(ratio, dtype=torch.bool)
        if self._config.use_cispo:
            return cispo(logprobs, ratio, advantages, self._config), is_bounded(ratio, self._config)
        return clipped_surrogate(ratio, advantages, self._config), is_clipped(ratio, advantages, self._config)
