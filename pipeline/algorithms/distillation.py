"""On-policy distillation: the policy samples, and learns the teacher's distribution at every sampled token.

The loss is `distillation_loss` in divergence.py; for teachers with another vocabulary, `universal_logit_loss` in
universal_logits.py. Both distributions use policy.generation.temperature, as sampling does. Several teachers may share the
samples: teacher_assignment.py. Rewards are not used. Not supported: the Jensen-Shannon divergence, a share of off-policy data
(lambda below 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from pipeline.algorithms.advantages import make_sample
from pipeline.algorithms.algorithm import Needs, OnlineAlgorithm
from pipeline.algorithms.sections import LossConfig, OnlineConfig
from pipeline.algorithms.teacher_assignment import SECTION, loaded_teachers, problems, with_teachers
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import Positive

if TYPE_CHECKING:
    from pipeline.config import Recipe
    from pipeline.types import GlobalCounts, LossOutput, Outputs, PackedBatch, RolloutGroup, Sample


@dataclass
class DistillationConfig(OnlineConfig):
    """On-policy distillation: the policy samples and learns the teacher's distribution over each sampled token."""

    num_prompts_per_step: Positive = 128
    """Prompts sampled in one step."""
    num_generations_per_prompt: Positive = 1
    """Answers sampled for each prompt."""
    topk_logits_k: Positive = 64
    """Number of the teacher's most likely tokens that the divergence sums over."""


class Distillation(OnlineAlgorithm):
    """On-policy distillation. The only model that learns is the policy; teachers are frozen."""

    Section = DistillationConfig
    reads = (
        *("loss_fn.kl_type", "loss_fn.mixed_kl_weight", "loss_fn.zero_outside_topk"),
        *("loss_fn.uld_hybrid_matched_weight", "loss_fn.uld_hybrid_unmatched_weight", "rollout", "teacher", SECTION),
    )

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        outside = recipe.loss_fn.zero_outside_topk and recipe.loss_fn.kl_type in ("reverse", "mixed")
        self._of_texts = recipe.loss_fn.kl_type in ("uld", "gold")
        self.needs = Needs(teacher_top_k=self.section.topk_logits_k, entropy=outside, own_top_k=self._of_texts)

    @override
    def compute_advantages(self, groups: list[RolloutGroup]) -> list[Sample]:
        """Return samples with advantages of 0; the loss does not use them."""
        samples = [make_sample(group.prompt, rollout, 0.0, rollout.reward) for group in groups for rollout in group.rollouts]
        return with_teachers(self.recipe, groups, samples) if self._several else samples

    @property
    def _several(self) -> bool:
        return bool(self.recipe.on_policy_distillation.teachers)

    @override
    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        from pipeline.algorithms.divergence import distillation_loss  # needs torch, which submission may lack
        from pipeline.algorithms.universal_logits import universal_logit_loss  # needs torch, which submission may lack

        teachers, compute = loaded_teachers(self.recipe) if self._several else (), distillation_loss
        if self._of_texts:
            compute = universal_logit_loss
        return compute(self.recipe.loss_fn, outputs, batch, counts, teachers)

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        loss = self.recipe.loss_fn
        if self._of_texts and loss.zero_outside_topk:
            message = f"got true with loss_fn.kl_type={loss.kl_type}, which renormalizes nothing; expected false"
            yield Problem("loss_fn.zero_outside_topk", "has-no-effect", message)
        for name in ("uld_hybrid_matched_weight", "uld_hybrid_unmatched_weight"):
            if loss.kl_type != "gold" and (weight := getattr(loss, name)) != getattr(LossConfig, name):
                message = f"got {weight} with loss_fn.kl_type={loss.kl_type}; expected 1. Try loss_fn.kl_type=gold"
                yield Problem(f"loss_fn.{name}", "has-no-effect", message)
        name = self.recipe.teacher.model_name
        if self._several:
            yield from problems(self.recipe)
            if name is not None:
                message = f"got {name} and {SECTION}.teachers; expected one of the two. Try teacher.model_name=null"
                yield Problem("teacher.model_name", "contradiction", message)
        elif name is None:
            yield Problem("teacher.model_name", "missing-value", "got null; expected a folder or a Hugging Face name")
