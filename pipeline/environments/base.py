"""What the pipeline asks of an environment: to judge what the policy says.

One turn for now. An environment of several turns adds `reset(prompt)`, and to `Outcome` what the policy is told next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pipeline.types import Prompt


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one turn."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)  # the same names for every answer; a step reports their means


class Environment(Protocol):
    def step(self, prompt: Prompt, text: str) -> Outcome:
        """Judge the policy's answer `text`. May take seconds, and may be called from a thread other than the one that made
        the environment, but from one at a time."""

    def close(self) -> None:
        """End what the environment started. It is not used afterwards."""
