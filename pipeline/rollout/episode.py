"""The state of one episode: its turns, its reward, and its next request."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np

from pipeline.rollout.judges.environment_steps import StepRequest
from pipeline.rollout.rollout_messages import RolloutWork
from pipeline.types import NOTHING_SAID, Completion, Prompt, Request, Rollout, Turn, VersionSpan


def sampling_seed(seed: int, purpose: str, prompt: int, sample: int, turn: int = 0) -> int:
    """Return a completion's own seed, in [0, 2**63). It depends on neither the engine nor what else it samples."""
    name = f"{seed}/{purpose}/{prompt}/{sample}" + (f"/{turn}" if turn else "")
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(eq=False, slots=True)
class Episode:
    """One episode of a group."""

    work: RolloutWork
    place: int  # index of its group in the work
    sample: int
    turns: list[Turn] = field(default_factory=list)  # judged turns
    completion: Completion | None = None  # the answer that the environment is judging
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    extracted: str = ""
    cut: bool = False  # end it as soon as possible

    def __str__(self) -> str:
        return f"{self.work.purpose} prompt {self.prompt.index}, sample {self.sample}, turn {len(self.turns)}"

    @property
    def prompt(self) -> Prompt:
        """Prompt of the episode's group."""
        return self.work.prompts[self.place]

    @property
    def id(self) -> str:
        """Id that is unique among the open episodes of an engine."""
        return f"{self.work.number}/{self.place}/{self.sample}"

    @property
    def request_id(self) -> str:
        """Id of the request for the current turn, which is being drawn or comes next."""
        return f"{self.id}/{len(self.turns)}"

    @property
    def last_turn(self) -> bool:
        """True if the turn that is being sampled or scored is the policy's last."""
        return self.cut or sum(not turn.thinking for turn in self.turns) + 1 >= self.work.max_turns

    @property
    def thinks(self) -> bool:
        """True if what is being drawn, or comes next, is what the policy thinks before an answer."""
        return self.work.sampling.thinking is not None and not self.thought

    @property
    def thought(self) -> bool:
        """True if the policy has thought, and its answer is being drawn or comes next."""
        return bool(self.turns) and self.turns[-1].thinking

    @property
    def tokens(self) -> np.ndarray:
        """The prompt and all that followed, up to the policy's next turn, [L] int32."""
        parts = [part for turn in self.turns for part in (turn.completion.tokens, turn.observation)]
        return np.concatenate([self.prompt.tokens, *parts]).astype(np.int32)

    def request(self) -> Request:
        """Return the request for the next turn."""
        seed = sampling_seed(self.work.seed, self.work.purpose, self.prompt.index, self.sample, len(self.turns))
        sampling, thinking = replace(self.work.sampling, thinking=None), self.work.sampling.thinking
        if thinking and self.thinks:
            sampling = replace(sampling, max_new_tokens=thinking.tokens, stop=(thinking.end,))
        return Request(self.request_id, self.tokens, seed, sampling)

    def think(self, completion: Completion, max_length: int) -> bool:
        """Keep what the policy thought, and return True if its answer can begin.

        False for a completion that is to be judged: an answer; one that ended its turn without the end of thinking, which is an
        answer too; one that was cut, or leaves no room. max_length: as for `step_request`.
        """
        thinking = self.work.sampling.thinking
        if thinking is None or self.thought or self.cut or (completion.finish == "stop" and not completion.stop):
            return False
        end = np.array(() if completion.stop else thinking.end_tokens, np.int32)
        if len(self.tokens) + len(completion.tokens) + len(end) >= max_length:
            return False
        self.turns.append(Turn(completion, end, thinking=True))
        return True

    @property
    def unanswered(self) -> bool:
        """True if `completion` is what the policy thought before an answer that cannot begin: cut, or without room."""
        answer = self.completion
        return answer is not None and self.thinks and (answer.finish != "stop" or bool(answer.stop))

    def step_request(self, max_length: int) -> StepRequest:
        """Return the request to the environment to judge `completion`. max_length: tokens of a prompt and all that follows."""
        assert self.completion is not None
        room = max_length - len(self.tokens) - len(self.completion.tokens) - 1
        begins = None if any(not turn.thinking for turn in self.turns) else self.prompt
        environment, answer = self.prompt.environment, self.completion
        if self.unanswered:
            return StepRequest(self.id, str(self), environment, begins, np.zeros(0, np.int32), True, room)
        return StepRequest(self.id, str(self), environment, begins, answer.tokens, self.last_turn, room, answer.stop)

    def drawn(self) -> list[VersionSpan]:
        """Return the spans of all turns but the one that is being drawn."""
        completions = [turn.completion for turn in self.turns] + ([self.completion] if self.completion else [])
        return [span for completion in completions for span in completion.spans]

    def rollout(self) -> Rollout:
        """Return the rollout of an episode that its environment has ended, or that has no more turns."""
        return Rollout(tuple(self.turns), self.reward, self.metrics, extracted=self.extracted)

    def cut_short(self) -> Rollout:
        """Return the rollout of an episode that is cut before the policy answers the last observation."""
        if not self.turns:
            return self.failed(NOTHING_SAID)
        *before, last = self.turns
        turns = (*before, Turn(replace(last.completion, finish="length")))
        return Rollout(turns, self.reward, self.metrics, extracted=self.extracted)

    def failed(self, why: str) -> Rollout:
        """Return the rollout of an episode that failed for a reason other than its answers; it is not trained on."""
        return Rollout(self._turns(), 0.0, failure=why)

    def broke(self, how: str, reward: float) -> Rollout:
        """Return the rollout of an episode whose answer broke its environment: wrong, whatever its turns had earned."""
        return Rollout(self._turns(), reward, broke=how)

    def _turns(self) -> tuple[Turn, ...]:
        return (*self.turns, *([Turn(self.completion)] if self.completion else []))
