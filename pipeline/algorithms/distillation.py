"""On-policy distillation: the policy samples, and learns the teacher's distribution of every token that it sampled.

Its loss is `distillation_loss` in divergence.py. Both distributions are at policy.generation.temperature, as the samples are.
Rewards are not used. Left out: the Jensen-Shannon divergence, a share of data that the policy did not sample (lambda below 1),
teachers with another vocabulary.
"""

from __future__ import annotations

from functools import partial

from pipeline.algorithms.advantages import sample
from pipeline.algorithms.base import Needs
from pipeline.algorithms.divergence import distillation_loss
from pipeline.config import DistillationConfig, LossConfig
from pipeline.types import PackedBatch, RolloutGroup, Sample


class Distillation:
    def __init__(self, config: DistillationConfig, loss: LossConfig):
        outside = loss.zero_outside_topk and loss.kl_type != "forward"
        self.needs = Needs(teacher_top_k=config.topk_logits_k, entropy=outside)
        self.losses = {"policy": partial(distillation_loss, loss)}

    def select(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        return groups

    def credit(self, groups: list[RolloutGroup]) -> list[Sample]:
        """Advantages are 0."""
        return [sample(group.prompt, rollout, 0.0, rollout.reward) for group in groups for rollout in group.rollouts]

    def estimate(self, batch: PackedBatch) -> PackedBatch:
        return batch

    def trains(self, step: int) -> tuple[str, ...]:
        return ("policy",)
