"""An environment that rewards even an untrained model."""

from pipeline.environments.environment import Environment, Outcome
from pipeline.types import Prompt


class Digits(Environment):
    """Rewards the share of the answer's characters that are digits."""

    def step(self, prompt: Prompt, text: str) -> Outcome:
        share = sum(character.isdigit() for character in text) / max(1, len(text))
        return Outcome(share, {"accuracy": float(share > 0.5)})
