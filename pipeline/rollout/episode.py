"""The state of one episode: its turns, its reward, and its next request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from pipeline.rollout.judges.environment_steps import StepRequest
from pipeline.rollout.rollout_messages import RolloutWork
from pipeline.rollout.seeds import sampling_seed
from pipeline.types import NOTHING_SAID, Completion, Prompt, Request, Rollout, Turn, VersionSpan, whole_reward

NO_OBSERVATION = np.zeros(0, np.int32)


@dataclass(eq=False, slots=True)
class Episode:
    """One episode of a group."""

    work: RolloutWork
    group_index: int  # in the prompts of the work
    sample: int
    turns: list[Turn] = field(default_factory=list)  # judged turns
    completion: Completion | None = None  # the answer that the environment is judging
    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    extracted: str = ""
    notes: dict[str, str] = field(default_factory=dict)
    cut: bool = False  # end it as soon as possible
    order: int = 0  # of a rollout function: how many began before it

    def __str__(self) -> str:
        return f"{self.work.purpose} prompt {self.prompt.index}, sample {self.sample}, turn {len(self.turns)}"

    @property
    def prompt(self) -> Prompt:
        """The prompt of the episode's group."""
        return self.work.prompts[self.group_index]

    @property
    def id(self) -> str:
        """An id that is unique among the open episodes of an engine."""
        return f"{self.work.number}/{self.group_index}/{self.sample}"

    @property
    def request_id(self) -> str:
        """The id of the request for the current turn, which is being drawn or comes next."""
        return f"{self.id}/{len(self.turns)}"

    @property
    def request_ids(self) -> Sequence[str]:
        """The ids of the requests that are being drawn or come next."""
        return (self.request_id,)

    @property
    def is_last_turn(self) -> bool:
        """True if the turn that is being drawn or judged is the policy's last."""
        return self.cut or sum(not turn.thinking for turn in self.turns) + 1 >= self.work.max_turns

    @property
    def is_thinking(self) -> bool:
        """True if the turn that is being drawn, or is drawn next, holds the policy's thoughts before an answer."""
        return self.work.sampling.thinking is not None and not self.has_thought

    @property
    def has_thought(self) -> bool:
        """True if the latest turn holds the policy's thoughts, so that its answer is being drawn or is drawn next."""
        return bool(self.turns) and self.turns[-1].thinking

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of the prompt and the turns so far, [L] int32."""
        tokens_of_turns = [tokens for turn in self.turns for tokens in (turn.completion.tokens, turn.observation)]
        return np.concatenate([self.prompt.tokens, *tokens_of_turns]).astype(np.int32)

    def requests(self) -> list[Request]:
        """Return the requests that come next: one for the next turn."""
        seed = sampling_seed(self.work.seed, self.work.purpose, self.prompt.index, self.sample, len(self.turns))
        sampling, thinking = replace(self.work.sampling, thinking=None), self.work.sampling.thinking
        if thinking and self.is_thinking:
            sampling = replace(sampling, max_new_tokens=thinking.tokens, stop=(thinking.end,))
        return [Request(self.request_id, self.tokens, seed, sampling, self._routed)]

    @property
    def _routed(self) -> int:
        """Return the number of leading tokens whose experts the turns so far have."""
        at, routed = len(self.prompt.tokens), 0
        for turn in self.turns:
            at += len(turn.completion.tokens)
            if turn.completion.experts is not None:
                routed = at - 1
            at += len(turn.observation)
        return routed

    def think(self, completion: Completion, max_length: int) -> bool:
        """Store a completion as a turn of thoughts if the policy's answer can begin after it, and return whether it can.

        False means that the completion itself must be judged, in one of these cases: the policy does not think or has thought
        already; the completion ended its turn without the end of thinking, so it is an answer; the episode is cut; or the
        completion leaves no room for an answer. max_length: as for `step_request`.
        """
        thinking = self.work.sampling.thinking
        if thinking is None or self.has_thought or self.cut or (completion.finish == "stop" and not completion.stop):
            return False
        end = np.array(() if completion.stop else thinking.end_tokens, np.int32)
        if len(self.tokens) + len(completion.tokens) + len(end) >= max_length:
            return False
        self.turns.append(Turn(completion, end, thinking=True))
        return True

    @property
    def is_unanswered(self) -> bool:
        """True if `completion` holds thoughts and the answer cannot begin: the episode is cut, or no room is left."""
        answer = self.completion
        return answer is not None and self.is_thinking and (answer.finish != "stop" or bool(answer.stop))

    def step_request(self, max_length: int) -> StepRequest:
        """Return the request to the environment to judge `completion`.

        max_length: maximum tokens of a prompt and its episode together.
        """
        assert self.completion is not None
        room = max_length - len(self.tokens) - len(self.completion.tokens) - 1
        prompt = None if any(not turn.thinking for turn in self.turns) else self.prompt
        environment, answer = self.prompt.environment, self.completion
        tokens, last, stop = answer.tokens, self.is_last_turn, answer.stop
        if self.is_unanswered:
            tokens, last, stop = np.zeros(0, np.int32), True, ""
        step, thought = self.work.step, self.has_thought
        return StepRequest(self.id, str(self), environment, prompt, tokens, last, room, stop, step, thought)

    def drawn_spans(self) -> list[VersionSpan]:
        """Return the version spans of all drawn turns, without the turn that is being drawn."""
        completions = [turn.completion for turn in self.turns] + ([self.completion] if self.completion else [])
        return [span for completion in completions for span in completion.spans]

    def rollout(self) -> Rollout:
        """Return the rollout of an episode that its environment ended, or that has no more turns."""
        return Rollout(tuple(self.turns), self.reward, self.metrics, extracted=self.extracted, notes=self.notes)

    def cut_rollout(self) -> Rollout:
        """Return the rollout of an episode that is cut before the policy answers the last observation."""
        if not self.turns:
            return self.failed_rollout(NOTHING_SAID)
        *earlier_turns, last_turn = self.turns
        completion = replace(last_turn.completion, finish="length")
        turns = (*earlier_turns, replace(last_turn, completion=completion, observation=NO_OBSERVATION))
        return Rollout(turns, self.reward, self.metrics, extracted=self.extracted, notes=self.notes)

    def failed_rollout(self, cause: str, notes: Mapping[str, str] | None = None) -> Rollout:
        """Return the rollout of an episode that failed for a reason other than its answers. It is not trained on."""
        return self._ended(0.0, failure=cause, notes=dict(notes or {}))

    def broken_rollout(self, cause: str, reward: float, notes: Mapping[str, str] | None = None) -> Rollout:
        """Return the rollout of an episode whose answer broke its environment. Rewards of its earlier turns do not count."""
        return self._ended(reward, broke=cause, notes=dict(notes or {}))

    def _ended(self, reward: float, **fields: Any) -> Rollout:
        played = self._played()
        return replace(played, turns=whole_reward(played.turns, reward), reward=reward, **fields)

    def _played(self) -> Rollout:
        """Return a rollout of what was drawn so far, without a reward."""
        return Rollout((*self.turns, *([Turn(self.completion)] if self.completion else [])), 0.0)
