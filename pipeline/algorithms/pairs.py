"""Losses on pairs of a chosen and a rejected answer. Sequence 2i of a batch is a chosen one, sequence 2i + 1 the rejected one.

A mean is over all pairs of the optimizer step, so each pair's share is divided by half of `GlobalCounts.sequences`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from pipeline.algorithms.reductions import sequence_means, sequence_sums
from pipeline.config import DPOConfig
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch


def dpo_loss(config: DPOConfig, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
    """Return this batch's share of DPO's loss (https://arxiv.org/abs/2305.18290) and of its metrics.

    With h = log pi(y) - log pi_ref(y), summed over the answer's tokens, and beta = reference_policy_kl_penalty:

        loss = preference_loss_weight * mean over pairs of L(h_c - h_r)
             + sft_loss_weight * mean over pairs of - log pi(y_c), per token with sft_average_log_probs

    L is `preference_loss`. preference_average_log_probs takes h per token of the answer (TRL's sigmoid_norm); IPO always does,
    as TRL 1.16 on the word of IPO's authors, though the paper does not say so. With reference_free, h = log pi(y).

    The rewards of the metrics are beta h, with h as the loss takes it. NeMo-RL logs h without beta, TRL beta h without dividing
    by the length.
    """
    ratios = outputs.logprobs if config.reference_free else outputs.logprobs - batch.reference_logprobs
    averaged = config.preference_average_log_probs or config.preference_loss == "ipo"
    chosen, rejected = split((sequence_means if averaged else sequence_sums)(ratios, batch))
    preference = pair_share(preference_loss(config, chosen - rejected), counts)
    reduced = (sequence_means if config.sft_average_log_probs else sequence_sums)(outputs.logprobs, batch)
    chosen_logprobs, _ = split(reduced)
    sft = pair_share(-chosen_logprobs, counts)
    beta = config.reference_policy_kl_penalty
    return LossOutput(
        config.preference_loss_weight * preference + config.sft_loss_weight * sft,
        {
            "preference_loss": preference.detach(),
            "sft_loss": sft.detach(),
            **_reward_metrics(beta * chosen, beta * rejected, counts),
        },
    )


def preference_loss(config: DPOConfig, margin: torch.Tensor) -> torch.Tensor:
    """Return L(margin) of margin = h_c - h_r, `[S/2]` each.

    sigmoid   - (1 - e) log sigma(beta margin) - e log sigma(-beta margin)        DPO eq. 7; e = label_smoothing:
                                                            conservative DPO, https://ericmitchell.ai/cdpo.pdf eq. 3
    ipo       (margin - 1 / (2 beta))^2                     IPO, https://arxiv.org/abs/2310.12036 eq. 17
    """
    beta, smoothing = config.reference_policy_kl_penalty, config.label_smoothing
    if config.preference_loss == "ipo":
        return (margin - 1 / (2 * beta)).square()
    return -(1 - smoothing) * logsigmoid(beta * margin) - smoothing * logsigmoid(-beta * margin)


def reward_model_loss(outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
    """Return this batch's share of the loss of Bradley and Terry (https://arxiv.org/abs/2203.02155 eq. 1) and of its metrics.

        loss = - mean over pairs of log sigma(r_c - r_r - m)

    r is the value head on the state after a sequence's last token, m the margin (Llama 2, https://arxiv.org/abs/2307.09288
    eq. 2): how much better the chosen answer is, by the data set's `margin_key`, else 0. `accuracy` is without it.
    """
    chosen, rejected = split(outputs.values[batch.cu_seqlens[1:].long() - 1])
    margins, _ = split(batch.rewards)
    loss = pair_share(-logsigmoid(chosen - rejected - margins), counts)
    return LossOutput(loss, _reward_metrics(chosen, rejected, counts))


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chosen and the rejected answers' values, `[S/2]` each, from `[S]`.

    An empty microbatch, which is packed as one token, has no pairs. Raises ValueError for any other odd number of sequences.
    """
    if len(values) == 1:
        values = values[:0]  # with its graph, for the backward pass
    if len(values) % 2:
        raise ValueError(f"{len(values)} sequences are no pairs; the microbatch has lost one")
    return values[0::2], values[1::2]


def pair_share(values: torch.Tensor, counts: GlobalCounts) -> torch.Tensor:
    """Return this batch's share of the mean over all pairs of the optimizer step: `[S/2]` -> `[]`."""
    return values.sum() / max(1.0, counts.sequences / 2)


def _reward_metrics(chosen: torch.Tensor, rejected: torch.Tensor, counts: GlobalCounts) -> dict[str, torch.Tensor]:
    """Return metrics of the rewards of the chosen and the rejected answers, `[S/2]` each."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "accuracy": pair_share((chosen > rejected).to(chosen.dtype), counts),
        "rewards_chosen_mean": pair_share(chosen, counts),
        "rewards_rejected_mean": pair_share(rejected, counts),
        "rewards_margin": pair_share(chosen - rejected, counts),
    }
