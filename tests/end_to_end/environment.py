"""Environments: one that rewards even an untrained model, and one that ends its judge."""

import os
import signal
from pathlib import Path

from pipeline.environments.environment import Environment, Outcome
from pipeline.types import Prompt


class Digits(Environment):
    """Rewards the share of the answer's characters that are digits."""

    def step(self, prompt: Prompt, text: str) -> Outcome:
        share = sum(character.isdigit() for character in text) / max(1, len(text))
        return Outcome(share, {"accuracy": float(share > 0.5)})


class DiesOnce(Digits):
    """Ends the judge of the first answer, on whatever rank."""

    def __init__(self, mark: str) -> None:
        self._mark = Path(mark)

    def step(self, prompt: Prompt, text: str) -> Outcome:
        try:
            self._mark.touch(exist_ok=False)
        except FileExistsError:
            return super().step(prompt, text)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it is dead")
