"""DPO: direct preference optimization (https://arxiv.org/abs/2305.18290) on pairs of a chosen and a rejected answer.

With h = log pi(y) - log pi_ref(y), summed over the answer's tokens:

    loss = preference_loss_weight * mean over pairs of L(h_c - h_r)
         + sft_loss_weight * mean over pairs of - log pi(y_c), per token with sft_average_log_probs

L is `preference_loss` in pairs.py. preference_average_log_probs divides h by the number of tokens of the answer (TRL's
sigmoid_norm). IPO always divides, as in TRL 1.16, which follows IPO's authors; the paper does not mention it. With
reference_free, h = log pi(y). Settings give the methods derived from DPO:

    conservative DPO    label_smoothing
    SimPO               reference_free=true, preference_average_log_probs=true, target_margin=gamma
    ORPO                preference_loss=orpo, preference_loss_weight=lambda, sft_loss_weight=1, sft_average_log_probs=true

The metrics report rewards beta h, with the same h as the loss. NeMo-RL logs h without beta, TRL beta h without dividing by the
length.

Not supported: divergences other than the reverse KL; hinge, robust, EXO, BCO, SPPO, APO on pairs; weights by length (LD-DPO)
or policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from typing_extensions import override

from pipeline.algorithms.algorithm import Needs, PairedAlgorithm
from pipeline.algorithms.sections import OfflineConfig
from pipeline.recipe.problems import Problem
from pipeline.recipe.values import LIVE, Bool, Float, interpolation
from pipeline.types import LossOutput

if TYPE_CHECKING:
    from pipeline.config import Recipe
    from pipeline.types import GlobalCounts, Outputs, PackedBatch


@dataclass
class DPOConfig(OfflineConfig):
    """Direct preference optimization. policy.train_global_batch_size counts pairs."""

    preference_loss: Literal["sigmoid", "ipo", "orpo"] = "sigmoid"
    """Preference loss. sigmoid: DPO. ipo: IPO. orpo: ORPO's odds ratio, which has no reference and no beta."""
    reference_policy_kl_penalty: Annotated[Float, LIVE, Field(gt=0)] = 0.05
    """DPO's beta."""
    label_smoothing: Annotated[Float, Field(ge=0, lt=0.5)] = 0.0
    """preference_loss=sigmoid: probability that a label is wrong. Above 0: conservative DPO."""
    target_margin: Annotated[Float, LIVE, Field(ge=0)] = 0.0
    """preference_loss=sigmoid: how much larger beta times the chosen answer's log-ratio should be. SimPO's gamma."""
    preference_average_log_probs: Bool = False
    """preference_loss=sigmoid: divide log-ratios by the number of tokens of the answer."""
    reference_free: Bool = False
    """Use a uniform distribution as the reference."""
    preference_loss_weight: Annotated[Float, LIVE, Field(ge=0)] = 1.0
    """Weight of the preference loss."""
    sft_loss_weight: Annotated[Float, LIVE, Field(ge=0)] = 0.0
    """Weight of the negative log-likelihood of the chosen answers."""
    sft_average_log_probs: Bool = interpolation("${.preference_average_log_probs}")
    """Divide the log-likelihood of the chosen answers by their number of tokens."""


class DPO(PairedAlgorithm):
    """Direct preference optimization. If reference_free is false, it needs the log-probs of the reference policy."""

    Section = DPOConfig

    def __init__(self, recipe: Recipe):
        super().__init__(recipe)
        self.needs = Needs(reference=self._has_reference)

    @property
    def _has_reference(self) -> bool:
        return not self.section.reference_free and self.section.preference_loss != "orpo"

    @override
    def loss(self, outputs: Outputs, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        from pipeline.algorithms.pairs import (  # needs torch, which submission may lack
            pair_share,
            preference_loss,
            reward_metrics,
            split,
        )
        from pipeline.algorithms.reductions import sequence_means, sequence_sums  # needs torch, which submission may lack

        config, beta = self.section, self.section.reference_policy_kl_penalty
        assert outputs.logprobs is not None
        ratios = outputs.logprobs
        if self._has_reference:
            assert batch.reference_logprobs is not None
            ratios = ratios - batch.reference_logprobs
        averaged = config.preference_average_log_probs or config.preference_loss != "sigmoid"
        chosen, rejected = split((sequence_means if averaged else sequence_sums)(ratios, batch))
        losses = preference_loss(config.preference_loss, chosen, rejected, beta, config.label_smoothing, config.target_margin)
        preference = pair_share(losses, counts)
        reduced = (sequence_means if config.sft_average_log_probs else sequence_sums)(outputs.logprobs, batch)
        chosen_logprobs, _ = split(reduced)
        sft = pair_share(-chosen_logprobs, counts)
        metrics = {"preference_loss": preference.detach(), "sft_loss": sft.detach()}
        metrics |= reward_metrics(beta * chosen, beta * rejected, counts)
        return LossOutput(config.preference_loss_weight * preference + config.sft_loss_weight * sft, metrics)

    @override
    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        config = self.section
        for key in ("label_smoothing", "target_margin"):
            if (value := getattr(config, key)) != 0 and config.preference_loss != "sigmoid":
                message = f"got {value}; expected 0 with {self.name}.preference_loss={config.preference_loss}"
                yield Problem(f"{self.name}.{key}", "has-no-effect", message)
        if config.preference_loss == "orpo":
            if config.reference_free:
                yield Problem(f"{self.name}.reference_free", "has-no-effect", "got true; ORPO has no reference anyway")
            if config.sft_loss_weight == 0:
                message = (
                    f"got 0; expected above 0, since ORPO adds its odds ratio to SFT's loss. Try {self.name}.sft_loss_weight=1"
                )
                yield Problem(f"{self.name}.sft_loss_weight", "contradiction", message)
        if config.preference_loss_weight == 0 and config.sft_loss_weight == 0:
            message = f"got 0 with {self.name}.sft_loss_weight=0, which leaves nothing to learn; expected one of them above 0"
            yield Problem(f"{self.name}.preference_loss_weight", "contradiction", message)
