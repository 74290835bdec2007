"""What the loop asks of an algorithm. An algorithm knows no backend: it sees samples, packed batches, and models' outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from pipeline.types import GlobalCounts, Head, LossOutput, Outputs, PackedBatch, RolloutGroup, Sample

Loss = Callable[[Outputs, PackedBatch, GlobalCounts], LossOutput]
"""(a model's outputs with a graph, the batch, the whole optimizer step's counts) -> this batch's share of the loss."""

Variance = Literal["biased", "unbiased"]
"""Which variance of the advantages becomes 1: `standard` in pipeline/algorithms/advantages.py."""


@dataclass(frozen=True)
class Needs:
    """What a step needs besides samples."""

    head: Head = "logprobs"  # of the model that `policy` describes; a reward model has "values"
    entropy: bool = False  # of every distribution, in the policy's outputs
    truncated: bool = (
        False  # the policy's log-probs (but the reference's) are of what policy.generation's top_p and top_k leave
    )
    old: bool = False  # log-probs by the policy as it is before the first update
    reference: bool = False  # log-probs by the policy as it was loaded at the start of the run
    critic: bool = False  # a model of its own; its values before the first update
    teacher_top_k: int = 0  # so many of the teacher's most likely tokens
    estimates: bool = False  # advantages are made on the train ranks, from the above: `OnlineAlgorithm.estimate`
    standardized: Variance | None = None  # they then get mean 0 and variance 1 over the step's counted tokens
    together: int = 1  # so many successive samples share a microbatch: 2 for pairs
    epochs: int = 1  # passes over the samples of a step
    schedule_every_epoch: bool = False  # schedules advance after each of them, not only after the last


class Objective(Protocol):
    """What a train rank needs of an algorithm."""

    needs: Needs
    losses: Mapping[str, Loss]  # by the model that is trained: "policy", "critic"


class OnlineAlgorithm(Objective, Protocol):
    """One that learns from rollouts."""

    def select(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """Those that are worth training on. With others than all, the loop samples until a step is full."""

    def credit(self, groups: list[RolloutGroup]) -> list[Sample]:
        """Turn rewards into advantages: one sample per rollout, in order."""

    def estimate(self, batch: PackedBatch) -> PackedBatch:
        """With `needs.estimates`: the batch with its final advantages (but for standardizing), returns and mask. Pure."""

    def trains(self, step: int) -> tuple[str, ...]:
        """Which of the models in `losses` learn in the step that comes after `step` others."""
