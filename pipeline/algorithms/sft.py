"""SFT: supervised fine-tuning, the mean negative log-likelihood of the tokens that the mask counts.

    loss = - sum_t mask_t log pi(y_t | y_<t) / sum_t mask_t

The mask (assistant turns only) is the data's. Left out: weighting of examples.
"""

from __future__ import annotations

from pipeline.algorithms.base import Needs
from pipeline.algorithms.reductions import masked_share
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch


class SFT:
    needs = Needs()

    def __init__(self) -> None:
        self.losses = {"policy": self.loss}

    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        return LossOutput(masked_share(-outputs.logprobs, batch, counts), {})
