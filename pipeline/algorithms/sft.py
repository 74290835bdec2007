"""SFT: supervised fine-tuning, the mean negative log-likelihood of the tokens that the mask counts: `sft_loss` in loss.py.

The mask (assistant turns only) is the data's. Left out: weighting of examples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.algorithms.base import Algorithm
from pipeline.algorithms.sections import OfflineConfig

if TYPE_CHECKING:
    from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch


@dataclass
class SFTConfig(OfflineConfig):
    """Supervised fine-tuning."""


class SFT(Algorithm):
    Section = SFTConfig

    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        from pipeline.algorithms.loss import sft_loss

        return sft_loss(outputs, batch, counts)
