"""A reward model as judge. Its score arrives on rank 0 once all answers of a step exist, not here on a generate rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from pipeline.environments.environment import BuiltinEnvironment, Outcome

if TYPE_CHECKING:
    from pipeline.types import Prompt


class RewardModelEnvironment(BuiltinEnvironment):
    """Reward 0 for every answer. `pipeline/coordination/scoring.py` replaces it by the model's score."""

    is_final = False

    @override
    def step(self, prompt: Prompt, text: str) -> Outcome:
        return Outcome(0.0)
