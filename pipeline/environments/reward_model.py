"""A reward model as judge. Rank 0 gets its scores when all answers of a step exist, after this environment's own outcomes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from pipeline.environments.environment import BuiltinEnvironment, Outcome

if TYPE_CHECKING:
    from pipeline.types import Prompt


class RewardModelEnvironment(BuiltinEnvironment):
    """Returns reward 0 for every answer. `pipeline/coordination/scoring.py` replaces it by the model's score."""

    is_final = False

    @classmethod
    @override
    def needs_answers(cls, arguments: Any) -> bool:
        return False

    @override
    def step(self, prompt: Prompt, text: str) -> Outcome:
        return Outcome(0.0)
