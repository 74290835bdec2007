"""SFT: supervised fine-tuning. The loss, `sft_loss` in loss.py, is the mean negative log-likelihood of the counted tokens.

The data set decides which tokens count: the tokens of the assistant's turns. Not supported: weights of examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from pipeline.algorithms.algorithm import Algorithm
from pipeline.algorithms.sections import OfflineConfig

if TYPE_CHECKING:
    from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch


@dataclass
class SFTConfig(OfflineConfig):
    """Supervised fine-tuning."""


class SFT(Algorithm):
    """Supervised fine-tuning."""

    Section = SFTConfig
    reads = ("data.learn_prefilled", "plan.longest_tokens")

    @override
    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        from pipeline.algorithms.loss import sft_loss  # needs torch, which submission may lack

        return sft_loss(outputs, batch, counts)
