"""KTO: Kahneman-Tversky optimization (https://arxiv.org/abs/2402.01306) on answers that are each labeled good or bad.

With h = log pi(y) - log pi_ref(y), summed over the answer's tokens, and s = 1 for a good answer, -1 for a bad one:

    loss = mean over answers of w (1 - sigma(beta s (h - z0)))         eq. 7; w: desirable_weight or undesirable_weight
    z0   = max(0, mean over the step's answers of log pi(y') - log pi_ref(y'))

y' is another prompt's answer, put behind this answer's prompt. z0 is a number: it has no gradient. preference_loss =
apo_zero_unpaired sets z0 = 0 (https://arxiv.org/abs/2408.06266, on answers in place of pairs).

The mean of z0 is over the whole step. TRL averages over the answers of a microbatch on all processes; ours equals TRL's where
these are the whole step. TRL rotates the answers of a microbatch by one; we rotate those of the step, and further if a rotation
by one gives a prompt an answer of its own, as can happen with the two answers of a pair.

Not supported: a reference policy that changes during the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field
from typing_extensions import override

from pipeline.algorithms.algorithm import Algorithm, Needs
from pipeline.algorithms.sections import OfflineConfig
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import LIVE, Float
from pipeline.types import LossOutput, Sample

if TYPE_CHECKING:
    from pipeline.config import Recipe
    from pipeline.types import GlobalCounts, Outputs, PackedBatch


@dataclass
class KTOConfig(OfflineConfig):
    """Kahneman-Tversky optimization. policy.train_global_batch_size counts answers."""

    preference_loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    """Preference loss. kto: KTO. apo_zero_unpaired: APO-zero, which has no reference point z0."""
    reference_policy_kl_penalty: Annotated[Float, LIVE, Field(gt=0)] = 0.1
    """KTO's beta."""
    desirable_weight: Annotated[Float, LIVE, Field(ge=0)] = 1.0
    """Weight of good answers. The paper advises that weight * number of the good answers is 1 to 4/3 times that of bad ones."""
    undesirable_weight: Annotated[Float, LIVE, Field(ge=0)] = 1.0
    """Weight of bad answers."""


class KTO(Algorithm):
    """Kahneman-Tversky optimization."""

    Section = KTOConfig
    labeled = True
    reads = ("data.learn_prefilled",)

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.needs = Needs(reference=True, mismatched=self.section.preference_loss == "kto")

    @override
    def mismatched(self, samples: list[Sample]) -> list[Sample]:
        """Return each sample's prompt with another sample's answer, cut to data.max_input_seq_length tokens."""
        longest = self.recipe.data.max_input_seq_length
        starts = [int(sample.loss_mask.argmax()) for sample in samples]
        shift = _rotation([sample.tokens[:start].tobytes() for sample, start in zip(samples, starts, strict=True)])
        return [_joined(sample, starts[i], samples[i - shift], starts[i - shift], longest) for i, sample in enumerate(samples)]

    @override
    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        import torch  # which submission may lack

        from pipeline.algorithms.reductions import sequence_sums  # needs torch, which submission may lack

        config = self.section
        assert outputs.logprobs is not None and batch.reference_logprobs is not None
        ratios = sequence_sums(outputs.logprobs - batch.reference_logprobs, batch)
        counted = sequence_sums(torch.ones_like(outputs.logprobs), batch) > 0  # an empty microbatch has no such sequence
        good, bad = ((counted & labels).to(ratios.dtype) for labels in (batch.rewards > 0, batch.rewards <= 0))
        weights = config.desirable_weight * good + config.undesirable_weight * bad
        losses = weights * torch.sigmoid(config.reference_policy_kl_penalty * (bad - good) * (ratios - batch.mean_kl))
        with torch.no_grad():
            rewards = config.reference_policy_kl_penalty * ratios
            chosen = (good * rewards).sum() / counts.good  # nan in a step without good answers
            rejected = (bad * rewards).sum() / (counts.sequences - counts.good)
            metrics = {
                "rewards_chosen_mean": chosen,
                "rewards_rejected_mean": rejected,
                "rewards_margin": chosen - rejected,
                "kl": batch.mean_kl * (good + bad).sum() / max(1, counts.sequences),
            }
        return LossOutput(losses.sum() / max(1, counts.sequences), metrics)

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        config, size = self.section, self.recipe.policy.train_global_batch_size
        if self.needs.mismatched and size < 2:
            message = f"got {size}; expected at least 2, since z0 is measured on the answers to other prompts of the step"
            yield Problem("policy.train_global_batch_size", "too-small", message)
        if config.desirable_weight == config.undesirable_weight == 0:
            message = f"got 0 with {self.name}.undesirable_weight=0; expected one of them above 0, or nothing is learned"
            yield Problem(f"{self.name}.desirable_weight", "contradiction", message)


def _rotation(prompts: list[bytes]) -> int:
    """Return the smallest rotation that gives the fewest samples an answer to their own prompt; 0 for a single sample."""
    first: dict[bytes, int] = {}
    numbers = np.array([first.setdefault(prompt, place) for place, prompt in enumerate(prompts)])
    fewest, best = len(prompts) + 1, 0
    for shift in range(1, len(prompts)):
        same = int((numbers == np.roll(numbers, shift)).sum())
        if same < fewest:
            fewest, best = same, shift
        if not fewest:
            break
    return best


def _joined(sample: Sample, start: int, other: Sample, other_start: int, longest: int) -> Sample:
    tokens = np.concatenate([sample.tokens[:start], other.tokens[other_start:]])[:longest]
    mask = np.concatenate([sample.loss_mask[:start], other.loss_mask[other_start:]])[:longest]
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens, mask, logprobs=zeros, advantages=zeros)
