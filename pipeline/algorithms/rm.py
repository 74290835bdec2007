"""The reward model of pairs of a chosen and a rejected answer; `policy` is the reward model.

Its loss is `reward_model_loss` in pairs.py. Left out: several answers ranked at once, regression on scores, a penalty that
centres rewards.
"""

from __future__ import annotations

from pipeline.algorithms.base import Needs
from pipeline.algorithms.pairs import reward_model_loss


class RewardModel:
    needs = Needs(head="values", together=2)

    def __init__(self) -> None:
        self.losses = {"policy": reward_model_loss}
