"""Losses on pairs of a chosen and a rejected answer.

Sequence 2i of a batch is a chosen answer, and sequence 2i + 1 is the rejected answer of the same pair. Means are over all pairs
of the optimizer step, so a batch's sums are divided by half of `GlobalCounts.sequences`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch


def preference_loss(
    kind: str, chosen: torch.Tensor, rejected: torch.Tensor, beta: float, smoothing: float, target: float = 0.0
) -> torch.Tensor:
    """Return L of the answers' h = log pi(y) - log pi_ref(y), `[S/2]` each, with m = beta (h_c - h_r) - target.

    sigmoid   - (1 - e) log sigma(m) - e log sigma(-m)   DPO, https://arxiv.org/abs/2305.18290 eq. 7
                                                         e = smoothing: conservative DPO, https://ericmitchell.ai/cdpo.pdf eq. 3
                                                         target > 0: SimPO, https://arxiv.org/abs/2405.14734 eq. 6
    ipo       (h_c - h_r - 1 / (2 beta))^2               IPO, https://arxiv.org/abs/2310.12036 eq. 17
    orpo      - log sigma(o_c - o_r)                     ORPO, https://arxiv.org/abs/2403.07691 eq. 7
                  o = h - log(1 - exp h): the log odds of an answer, with h = log pi(y) per token
    """
    if kind == "orpo":
        return -logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    if kind == "ipo":
        return (chosen - rejected - 1 / (2 * beta)).square()
    margin = beta * (chosen - rejected) - target
    return -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)


def _log_odds(logprobs: torch.Tensor) -> torch.Tensor:
    """Return log p - log(1 - p). At p = 1 up to rounding, p is the largest number below 1."""
    below_one = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    return below_one - torch.log(-torch.expm1(below_one))


def reward_model_loss(outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
    """Return this batch's share of the Bradley-Terry loss (https://arxiv.org/abs/2203.02155 eq. 1) and of its metrics.

        loss = - mean over pairs of log sigma(r_c - r_r - m)

    r is the output of the value head at a sequence's last token. m is the margin (Llama 2, https://arxiv.org/abs/2307.09288 eq.
    2), which says how much better the chosen answer is: the record's value of `margin_key`, or 0. `accuracy` ignores m.
    """
    assert outputs.values is not None
    chosen, rejected = split(outputs.values[batch.cu_seqlens[1:].long() - 1])
    margins, _ = split(batch.rewards)
    loss = pair_share(-logsigmoid(chosen - rejected - margins), counts)
    return LossOutput(loss, reward_metrics(chosen, rejected, counts))


def split(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split values of sequences, `[S]`, into those of the chosen and those of the rejected answers, `[S/2]` each.

    A single sequence is an empty microbatch, packed as one token: it has no pairs. Raise ValueError for other odd numbers.
    """
    if len(values) == 1:
        values = values[:0]  # with its graph, for the backward pass
    if len(values) % 2:
        raise ValueError(f"got a microbatch of {len(values)} sequences; expected pairs of a chosen and a rejected answer")
    return values[0::2], values[1::2]


def pair_share(values: torch.Tensor, counts: GlobalCounts) -> torch.Tensor:
    """Return this batch's share of the mean over all pairs of the optimizer step: `[S/2]` -> `[]`."""
    return values.sum() / max(1.0, counts.sequences / 2)


def reward_metrics(chosen: torch.Tensor, rejected: torch.Tensor, counts: GlobalCounts) -> dict[str, torch.Tensor]:
    """Return metrics of the rewards of the chosen and the rejected answers, `[S/2]` each."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "accuracy": pair_share((chosen > rejected).to(chosen.dtype), counts),
        "rewards_chosen_mean": pair_share(chosen, counts),
        "rewards_rejected_mean": pair_share(rejected, counts),
        "rewards_margin": pair_share(chosen - rejected, counts),
    }
