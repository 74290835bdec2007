"""A reward model as judge. It does not judge here, on a generate rank, but on rank 0's word, once all answers of a step are
there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.environments.base import BuiltinEnvironment, Outcome

if TYPE_CHECKING:
    from pipeline.types import Prompt


class RewardModelEnvironment(BuiltinEnvironment):
    """Reward 0 for every answer. `pipeline/scoring.py` puts the model's score in its place."""

    is_final = False

    def step(self, prompt: Prompt, text: str) -> Outcome:
        return Outcome(0.0)
