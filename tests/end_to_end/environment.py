"""An environment that rewards even an untrained model."""

from dataclasses import replace

from pipeline.environments.environment import Environment, Outcome
from pipeline.types import Prompt


class Digits(Environment):
    """Rewards the share of the answer's characters that are digits."""

    def step(self, prompt: Prompt | None, text: str) -> Outcome:
        share = sum(character.isdigit() for character in text) / max(1, len(text))
        return Outcome(share, {"accuracy": float(share > 0.5)})


class Drill(Digits):
    """Rewards each of three turns as `Digits`. A turn without a digit is malformed."""

    def reset(self, prompt: Prompt) -> list[float]:
        return []

    def step(self, episode: list[float], text: str) -> Outcome:
        outcome = super().step(None, text)
        episode.append(outcome.reward)
        observation = {"role": "user", "content": " more: "} if len(episode) < 3 else None
        return replace(outcome, observation=observation, malformed=outcome.reward == 0)
