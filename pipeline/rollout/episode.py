"""An episode: what the policy has said and been told, what it earned, and what it asks the engine next."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

from pipeline.rollout.environment_threads import StepRequest
from pipeline.rollout.work import RolloutWork
from pipeline.types import NOTHING_SAID, Completion, Prompt, Request, Rollout, Turn, VersionSpan


def sampling_seed(seed: int, purpose: str, prompt: int, sample: int, turn: int = 0) -> int:
    """Return a completion's own seed, in [0, 2**63). The engine and what it samples besides do not enter."""
    name = f"{seed}/{purpose}/{prompt}/{sample}" + (f"/{turn}" if turn else "")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(eq=False, slots=True)
class Episode:
    work: RolloutWork
    place: int  # of its group in the work
    sample: int
    turns: list[Turn] = field(default_factory=list)  # that are over; the environment has answered
    completion: Completion | None = None  # that the environment is judging
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    cut: bool = False  # it is to end where it is

    def __str__(self) -> str:
        return f"{self.work.purpose} prompt {self.prompt.index}, sample {self.sample}, turn {len(self.turns)}"

    @property
    def prompt(self) -> Prompt:
        return self.work.prompts[self.place]

    @property
    def id(self) -> str:
        """Unique among the episodes of an engine that are open."""
        return f"{self.work.number}/{self.place}/{self.sample}"

    @property
    def request_id(self) -> str:
        """The request of the turn that comes next, or is being drawn."""
        return f"{self.id}/{len(self.turns)}"

    @property
    def last_turn(self) -> bool:
        """Whether the policy speaks no more after the turn that is being drawn or judged."""
        return self.cut or len(self.turns) + 1 >= self.work.max_turns

    @property
    def tokens(self) -> np.ndarray:
        """[L] int32: the prompt and all that followed, up to where the policy speaks next."""
        parts = [part for turn in self.turns for part in (turn.completion.tokens, turn.observation)]
        return np.concatenate([self.prompt.tokens, *parts]).astype(np.int32)

    def request(self) -> Request:
        """Return the request for the turn that comes next."""
        seed = sampling_seed(self.work.seed, self.work.purpose, self.prompt.index, self.sample, len(self.turns))
        return Request(self.request_id, self.tokens, seed, self.work.sampling)

    def step_request(self, max_length: int) -> StepRequest:
        """Return `completion` for the environment. max_length: tokens of a prompt and all that follows."""
        room = max_length - len(self.tokens) - len(self.completion.tokens) - 1
        begins = None if self.turns else self.prompt
        return StepRequest(self.id, str(self), self.prompt.environment, begins, self.completion.tokens, self.last_turn, room)

    def drawn(self) -> list[VersionSpan]:
        """Return the spans of all turns but the one that is being drawn."""
        completions = [turn.completion for turn in self.turns] + ([self.completion] if self.completion else [])
        return [span for completion in completions for span in completion.spans]

    def rollout(self) -> Rollout:
        """Return the episode as ended by its environment, or because it has no more turns."""
        return Rollout(tuple(self.turns), self.reward, self.metrics)

    def cut_short(self) -> Rollout:
        """Return the episode as ended where it is: nothing was said to what it was last told."""
        if not self.turns:
            return self.failed(NOTHING_SAID)
        *before, last = self.turns
        return Rollout((*before, Turn(replace(last.completion, finish="length"))), self.reward, self.metrics)

    def failed(self, why: str) -> Rollout:
        """Return the episode as ended through no doing of the policy's: it is not learned from."""
        return Rollout(self._turns(), 0.0, failure=why)

    def broke(self, how: str, reward: float) -> Rollout:
        """Return the episode as ended because the answer broke its judge: a wrong one, whatever its turns had earned."""
        return Rollout(self._turns(), reward, broke=how)

    def _turns(self) -> tuple[Turn, ...]:
        return (*self.turns, *([Turn(self.completion)] if self.completion else []))
