"""On-policy distillation: the policy samples, and learns the teacher's distribution of every token of what it has sampled
(GKD, https://arxiv.org/abs/2306.13649 eq. 4 with lambda = 1).

With p = teacher and q = policy, over the k tokens that the teacher finds most likely (distillation.topk_logits_k):

    forward   sum_v p_v (log p_v - log q_v)
    reverse   sum_v q_v (log q_v - log p_v)
    mixed     mixed_kl_weight * forward + (1 - mixed_kl_weight) * reverse

averaged over all sampled tokens of the step. p and q are of the whole vocabulary, so what lies outside the k tokens is left out
of the sums; the divergences are exact where k is the vocabulary. With zero_outside_topk the reverse one has the rest too: there
the teacher is taken to have log p = -100, as in NeMo-RL, and the rest of the policy's own sum follows from its exact entropy.

Rewards are not learnt from. Left out: the Jensen-Shannon divergence, temperatures, a share of data that the policy did not
sample (lambda below 1), teachers with another vocabulary.
"""

from __future__ import annotations

import torch

from pipeline.algorithms.base import Needs
from pipeline.algorithms.reductions import masked_share
from pipeline.algorithms.samples import sample
from pipeline.config import DistillationConfig, LossConfig
from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch, RolloutGroup, Sample

LOG_INFINITESIMAL = -100.0  # NeMo-RL's, DistillationLossFn


class Distillation:
    def __init__(self, config: DistillationConfig, loss: LossConfig):
        self._loss = loss
        self._rest = loss.zero_outside_topk and loss.kl_type != "forward"
        self.needs = Needs(teacher_top_k=config.topk_logits_k, entropy=self._rest)
        self.losses = {"policy": self.loss}

    def select(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        return groups

    def credit(self, groups: list[RolloutGroup]) -> list[Sample]:
        """Advantages are 0."""
        return [sample(group.prompt, rollout, 0.0, rollout.reward) for group in groups for rollout in group.rollouts]

    def estimate(self, batch: PackedBatch) -> PackedBatch:
        return batch

    def trains(self, step: int) -> tuple[str, ...]:
        return ("policy",)

    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        teacher, policy = batch.teacher.logprobs, outputs.top_k.logprobs  # [T, K] each, of the same tokens
        p, q = teacher.exp(), policy.exp()
        forward = (p * (teacher - policy)).sum(-1)
        reverse = (q * (policy - teacher)).sum(-1)
        if self._rest:
            entropy_of_rest = -outputs.entropy - (q * policy).sum(-1)  # sum of q log q outside the k tokens
            reverse = reverse + entropy_of_rest - LOG_INFINITESIMAL * (1 - q.sum(-1))
        weight = {"forward": 1.0, "reverse": 0.0, "mixed": self._loss.mixed_kl_weight}[self._loss.kl_type]
        loss = masked_share(weight * forward + (1 - weight) * reverse, batch, counts)
        with torch.no_grad():
            metrics = {
                "forward_kl": masked_share(forward, batch, counts),
                "reverse_kl": masked_share(reverse, batch, counts),
                "teacher_top_k_mass": masked_share(p.sum(-1), batch, counts),
                "policy_top_k_mass": masked_share(q.sum(-1), batch, counts),
            }
        return LossOutput(loss, metrics)
