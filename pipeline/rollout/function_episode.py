"""The state of an episode that a user's rollout function or an agent plays, on the engine's rank.

The rank keeps every completion itself. The function's process names the last turn of its conversation, so neither tokens nor
log-probs of a rollout come from there. Of an agent's episode all conversations are kept.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

import numpy as np
from typing_extensions import override

from pipeline.rollout.episode import Episode
from pipeline.rollout.function_messages import Draw, EpisodeSettings, FunctionCall
from pipeline.rollout.judges.environment_steps import StepOutcome
from pipeline.types import NOTHING_SAID, Branch, Completion, Request, Rollout, Turn, VersionSpan, whole_reward

UNASKED = "its agent asked the policy for nothing"
UNREWARDED = "its function let EpisodeEnded pass before a turn had a reward"


@dataclass(eq=False, slots=True)
class FunctionEpisode(Episode):
    """One episode of a group."""

    function: str = ""  # the dotted path of a function, or the environment of an agent
    is_agent: bool = False
    begun: bool = False  # the function's first call was sent
    draws: dict[int, Draw] = field(default_factory=dict)  # by number
    completions: dict[int, Completion] = field(default_factory=dict)  # of the draws that have ended, by number
    next_draws: list[Draw] = field(default_factory=list)  # that the engine does not have yet
    unsent: list[int] = field(default_factory=list)  # completions that the function does not have yet
    ending: Rollout | None = None  # its rollout; the engine still has requests of it, which the function did not wait for

    def __str__(self) -> str:
        draws = f"{len(self.draws)} draws" if len(self.draws) != 1 else "1 draw"
        return f"{self.work.purpose} prompt {self.prompt.index}, sample {self.sample}, {self.function} after {draws}"

    @property
    @override
    def request_ids(self) -> list[str]:
        return [self._id(number) for number in self.draws if number not in self.completions]

    def _id(self, number: int) -> str:
        return f"{self.id}/{number}"

    @override
    def requests(self) -> list[Request]:
        draws, self.next_draws = self.next_draws, []
        return [Request(self._id(draw.number), draw.tokens, draw.seed, draw.sampling, self._routed_of(draw)) for draw in draws]

    def _routed_of(self, draw: Draw) -> int:
        """Return the number of leading tokens of a draw whose experts the draw before it has; see Request.routed."""
        before = None if draw.previous is None else self.completions.get(draw.previous)
        if draw.previous is None or before is None or before.experts is None:
            return 0
        return len(self.draws[draw.previous].tokens) + len(before.tokens) - 1

    def receive(self, completion: Completion) -> None:
        """Store a completion that the engine returned."""
        number = int(completion.id.rpartition("/")[2])
        self.completions[number] = completion
        self.unsent.append(number)

    def call(self, max_length: int) -> FunctionCall:
        """Return the next call of the function. max_length: maximum tokens of a prompt and its episode together."""
        settings, prompt = None, None
        if not self.begun:
            work = self.work
            settings = EpisodeSettings(
                work.seed, work.purpose, self.sample, work.sampling, work.max_turns, max_length, work.step
            )
            self.begun, prompt = True, self.prompt
        unsent, self.unsent = self.unsent, []
        completions = tuple((number, replace(self.completions[number], experts=None)) for number in unsent)
        return FunctionCall(self.id, str(self), self.prompt.environment, prompt, settings, completions, self.cut)

    @property
    def has_last_turn(self) -> bool:
        """True if the function has a conversation of as many turns as it may have, so that it probably draws no more."""
        return bool(self.completions) and len(self._numbers(next(reversed(self.completions)))) >= self.work.max_turns

    @property
    def has_said(self) -> bool:
        """True if the policy has said something in the episode."""
        return any(len(completion.tokens) for completion in self.completions.values())

    def _numbers(self, last: int) -> list[int]:
        """Return the draws of the conversation that ends in draw `last`, in order."""
        numbers = [last]
        while (previous := self.draws[numbers[-1]].previous) is not None:
            numbers.append(previous)
        return numbers[::-1]

    def take(self, draws: tuple[Draw, ...]) -> None:
        """Take the draws that the function asks for."""
        self.draws |= {draw.number: draw for draw in draws}
        self.next_draws += draws

    def drop_next(self) -> None:
        """Forget the draws that the engine does not have yet."""
        for draw in self.next_draws:
            del self.draws[draw.number]
        self.next_draws = []

    @override
    def drawn_spans(self) -> list[VersionSpan]:
        return [span for completion in self.completions.values() for span in completion.spans]

    def ended_rollout(self, outcome: StepOutcome) -> Rollout:
        """Return the rollout of a function that has returned, or that let EpisodeEnded pass."""
        assert outcome.function is not None
        if outcome.function.last is None:
            return self.failed_rollout(NOTHING_SAID if self.cut else UNASKED if self.is_agent else UNREWARDED)
        played, verdicts = self._tree(outcome.function.last, outcome.function.others), outcome.function.verdicts
        if verdicts:
            turns = tuple(
                replace(turn, reward=verdict.reward, malformed=verdict.malformed)
                for turn, verdict in zip(played.turns, verdicts, strict=True)
            )
        else:  # of an agent
            turns = whole_reward(played.turns, outcome.reward)
        if outcome.function.truncated:
            *before, last = turns
            turns = (*before, replace(last, completion=replace(last.completion, finish="length")))
        judged = {"metrics": outcome.metrics, "extracted": outcome.extracted, "notes": outcome.notes}
        return replace(played, turns=turns, reward=outcome.reward, **judged)

    @override
    def cut_rollout(self) -> Rollout:
        return self.failed_rollout(NOTHING_SAID)

    @override
    def _played(self) -> Rollout:
        """Return the latest conversation that begins with the prompt, or all conversations of an agent."""
        if self.is_agent:
            said = [number for number, completion in self.completions.items() if len(completion.tokens)]
            continued = {self.draws[number].previous for number in said}
            ends = sorted(number for number in said if number not in continued)
            return self._tree(ends[-1], tuple(ends[:-1])) if ends else Rollout((), 0.0)
        ends = [number for number in self.completions if self._begins_with_prompt(number)]
        return self._tree(ends[-1], ()) if ends else Rollout((), 0.0)

    def _tree(self, last: int, others: tuple[int, ...]) -> Rollout:
        """Return the conversations that end in these draws. A turn of several is in the first of them, `last` first."""
        numbers = self._numbers(last)
        context = self.draws[numbers[0]].tokens
        told, branches = {*numbers}, []
        for other in others:
            rest = [number for number in self._numbers(other) if number not in told]
            told.update(rest)
            branches.append(Branch(self.draws[rest[0]].tokens, tuple(self._turns(rest))))
        own = None if np.array_equal(context, self.prompt.tokens) else context
        return Rollout(tuple(self._turns(numbers)), 0.0, context=own, branches=tuple(branches))

    def _begins_with_prompt(self, number: int) -> bool:
        first = self.draws[self._numbers(number)[0]]
        return np.array_equal(first.tokens, self.prompt.tokens) and len(self.completions[number].tokens) > 0

    def _turns(self, numbers: list[int]) -> list[Turn]:
        """Return successive draws of a conversation as turns. The tokens between two of them are observations."""
        turns = [Turn(self.completions[number]) for number in numbers]
        for place, (number, following) in enumerate(itertools.pairwise(numbers)):
            length = len(self.draws[number].tokens) + len(self.completions[number].tokens)
            turns[place] = replace(turns[place], observation=self.draws[following].tokens[length:])
        return turns
