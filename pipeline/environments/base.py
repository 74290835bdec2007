"""What the pipeline asks of an environment: to judge what the policy says, and to answer it.

An episode begins with `reset` and a prompt; the policy speaks, `step` judges and perhaps answers, and so on until an outcome
has no observation, or the episode has no more turns or tokens. Its reward is the sum over its turns.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.types import Prompt


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one turn."""

    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # the last turn's are the episode's; a step reports their means
    observation: dict[str, str] | None = None  # what the policy is told: {"role", "content"}; None: the episode is over


class Environment(Protocol):
    """One object serves all episodes of its kind on an engine. To derive from it gives what is not abstract here.

    It runs in threads of a process beside the engine; of the engine's own with policy.generation.environment_process=false. A
    `step` that raises, or takes longer than `env.<name>.timeout_s`, costs that episode, not the run; one that ends the process
    costs the episodes in it. A step that outlasts its time should end itself, as nothing else can end a thread.
    """

    workers: int = 1  # how many episodes may be in `reset` or `step` at once; 1: one at a time

    def reset(self, prompt: Prompt) -> Any:
        """Begin an episode: all that `step` is to know of it, and may change. The prompt itself, if nothing more is needed."""
        return prompt

    @abstractmethod
    def step(self, episode: Any, text: str) -> Outcome:
        """Judge what the policy said, and answer. May take seconds, and may be called from any thread."""

    def close(self) -> None:
        """End what the environment started. It is not used afterwards."""
