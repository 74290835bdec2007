"""The reward model of pairs of a chosen and a rejected answer (Bradley and Terry 1952; https://arxiv.org/abs/2203.02155 eq. 1).

    loss = - mean over pairs of log sigma(r_c - r_r - m)

r is the value head on the state after a sequence's last token. m is the margin of Llama 2 (https://arxiv.org/abs/2307.09288
eq. 2), by how much the chosen answer is the better one: the data set's (`margin_key`), else 0. `accuracy` is without it.

Left out: several answers ranked at once, regression on scores, a penalty that centres rewards.
"""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from pipeline.algorithms.base import Needs
from pipeline.algorithms.pairs import pair_share, reward_metrics, split
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch


class RewardModel:
    needs = Needs(head="values", together=2)

    def __init__(self) -> None:
        self.losses = {"policy": self.loss}

    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        chosen, rejected = split(outputs.values[batch.cu_seqlens[1:].long() - 1])
        margins, _ = split(batch.rewards)
        loss = pair_share(-logsigmoid(chosen - rejected - margins), counts)
        return LossOutput(loss, reward_metrics(chosen, rejected, counts))
