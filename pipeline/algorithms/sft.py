"""SFT: supervised fine-tuning, the mean negative log-likelihood of the tokens that the mask counts.

    loss = - sum_t mask_t log pi(y_t | y_<t) / sum_t mask_t

The mask (assistant turns only) is the data's. Left out: weighting of examples.
"""

from __future__ import annotations

import torch

from pipeline.algorithms.base import Needs
from pipeline.algorithms.reductions import masked_share
from pipeline.types import GlobalCounts, LossOutput, PackedBatch


class SFT:
    needs = Needs()

    def loss(self, logprobs: torch.Tensor, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        return LossOutput(masked_share(-logprobs, batch, counts), {})
