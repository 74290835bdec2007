"""RM: reward models trained on pairs of a chosen and a rejected answer.

The loss is `reward_model_loss` in pairs.py. Not supported: ranking several answers, regression on scores, a penalty that
centers rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from pipeline.algorithms.algorithm import Needs, PairedAlgorithm
from pipeline.algorithms.sections import OfflineConfig

if TYPE_CHECKING:
    from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch


@dataclass
class RMConfig(OfflineConfig):
    """Bradley-Terry reward model, which is `policy`. policy.train_global_batch_size counts pairs."""


class RM(PairedAlgorithm):
    """Reward-model training. The trained model has a value head in place of the vocabulary."""

    Section = RMConfig
    needs = Needs(head="values")

    @override
    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        from pipeline.algorithms.pairs import reward_model_loss  # needs torch, which submission may lack

        return reward_model_loss(outputs, batch, counts)
