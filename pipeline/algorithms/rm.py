"""The reward model of pairs of a chosen and a rejected answer.

Its loss is `reward_model_loss` in pairs.py. Left out: several answers ranked at once, regression on scores, a penalty that
centres rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.algorithms.base import Needs, PairedAlgorithm
from pipeline.algorithms.sections import OfflineConfig

if TYPE_CHECKING:
    from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch


@dataclass
class RMConfig(OfflineConfig):
    """Bradley-Terry reward model, which is `policy`. policy.train_global_batch_size counts pairs."""


class RM(PairedAlgorithm):
    Section = RMConfig
    needs = Needs(head="values")

    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        from pipeline.algorithms.pairs import reward_model_loss

        return reward_model_loss(outputs, batch, counts)
