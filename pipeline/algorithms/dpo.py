"""DPO: direct preference optimization (https://arxiv.org/abs/2305.18290) on pairs of a chosen and a rejected answer.

With h = log pi(y) - log pi_ref(y), summed over the answer's tokens, and beta = reference_policy_kl_penalty:

    sigmoid   - (1 - e) log sigma(beta (h_c - h_r)) - e log sigma(-beta (h_c - h_r))      DPO eq. 7; e = label_smoothing:
                                                           conservative DPO, https://ericmitchell.ai/cdpo.pdf eq. 3
    ipo       (h_c / |y_c| - h_r / |y_r| - 1 / (2 beta))^2      IPO, https://arxiv.org/abs/2310.12036 eq. 17

preference_average_log_probs takes h per token of the answer in `sigmoid` too (TRL's sigmoid_norm). `ipo` always does, as TRL
1.16 does on the word of IPO's authors; the paper does not say so. A uniform reference (reference_free) leaves h = log pi(y).

    loss = preference_loss_weight * mean over pairs of the above
         + sft_loss_weight * mean over pairs of - log pi(y_c), per token with sft_average_log_probs

The rewards of the metrics are beta h, with h as the loss takes it. NeMo-RL logs h without beta, TRL beta h without dividing by
the length.

Left out: divergences other than the reverse KL; hinge, robust, EXO, BCO, SPPO, APO; weights by length (LD-DPO) or by policy.
"""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from pipeline.algorithms.base import Needs
from pipeline.algorithms.pairs import pair_share, reward_metrics, split
from pipeline.algorithms.reductions import sequence_means, sequence_sums
from pipeline.config import DPOConfig
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch


class DPO:
    def __init__(self, config: DPOConfig):
        self._config = config
        self.needs = Needs(reference=not config.reference_free, together=2)
        self.losses = {"policy": self.loss}

    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        config = self._config
        ratios = outputs.logprobs if config.reference_free else outputs.logprobs - batch.reference_logprobs
        averaged = config.preference_average_log_probs or config.preference_loss == "ipo"
        chosen, rejected = split((sequence_means if averaged else sequence_sums)(ratios, batch))
        preference_loss = pair_share(self._preference_loss(chosen - rejected), counts)
        reduced = (sequence_means if config.sft_average_log_probs else sequence_sums)(outputs.logprobs, batch)
        chosen_logprobs, _ = split(reduced)
        sft_loss = pair_share(-chosen_logprobs, counts)
        beta = config.reference_policy_kl_penalty
        return LossOutput(
            config.preference_loss_weight * preference_loss + config.sft_loss_weight * sft_loss,
            {
                "preference_loss": preference_loss.detach(),
                "sft_loss": sft_loss.detach(),
                **reward_metrics(beta * chosen, beta * rejected, counts),
            },
        )

    def _preference_loss(self, margin: torch.Tensor) -> torch.Tensor:
        """margin: h_c - h_r, `[S/2]`."""
        beta, smoothing = self._config.reference_policy_kl_penalty, self._config.label_smoothing
        if self._config.preference_loss == "ipo":
            return (margin - 1 / (2 * beta)).square()
        return -(1 - smoothing) * logsigmoid(beta * margin) - smoothing * logsigmoid(-beta * margin)
