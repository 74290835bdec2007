"""Where a reward model judges: not here, on a generate rank, but on rank 0's word, once all answers of a step are there."""

from __future__ import annotations

from pipeline.environments.base import Environment, Outcome
from pipeline.types import Prompt


class RewardModel(Environment):
    """Reward 0 for every answer. `pipeline/scoring.py` puts the model's score in its place."""

    def step(self, prompt: Prompt, text: str) -> Outcome:
        return Outcome(0.0)
