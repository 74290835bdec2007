"""What the loop asks of an algorithm. An algorithm knows no backend: it sees samples, log-probs and packed batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pipeline.types import GlobalCounts, LossOutput, PackedBatch, RolloutGroup, Sample


@dataclass(frozen=True)
class Needs:
    """Log-probs to compute before the first update of a step."""

    old: bool = False  # by the policy as it is then
    reference: bool = False  # by the policy as it was loaded at the start of the run


class Objective(Protocol):
    """What a train rank needs of an algorithm."""

    needs: Needs

    def loss(self, logprobs: torch.Tensor, batch: PackedBatch, counts: GlobalCounts) -> LossOutput:
        """This batch's share of the loss. `logprobs` is `[T]` float32 with a graph; `counts` is the whole optimizer step's."""


class OnlineAlgorithm(Objective, Protocol):
    """One that learns from rollouts."""

    def credit(self, groups: list[RolloutGroup]) -> list[Sample]:
        """Turn rewards into advantages: one sample per rollout, in order."""
