"""Score an answer with a reward function, or with several rewards whose weighted sum is the reward.

`reward_forms.py` describes the functions. If a function raises, or returns no reward, the answer is wrong, as in any
environment; the metric `broke_judge` is the share of such answers, and the log and the rollouts name the function and the
record. If a function cannot judge for a reason that no answer can cause, such as a lost connection, it raises
`pipeline.environments.environment.Unjudged`, and the episode is dropped. So are episodes whose record lacks a column that the
function needs.

Async functions run in the judge's process, in an event loop that stays open between answers; those of one answer run at the
same time. `env.NAME.timeout_s` limits them, as it limits any turn.

A function of TRL's form may return None if it does not apply to the answer. Then the sum has the other rewards alone. If no
reward applies, the answer counts as wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from pipeline.config import TokenizerConfig
from pipeline.data.chat import load_tokenizer
from pipeline.environments.environment import (
    AnsweredTurn,
    Environment,
    JudgeLimits,
    Outcome,
    ProcessStuck,
    ServedJudge,
    Unjudged,
)
from pipeline.environments.reward_forms import (
    JUDGE_TOKENIZER,
    OF_JUDGE,
    ROUTER,
    RewardForm,
    Score,
    is_async,
    parameters_of,
)
from pipeline.sandbox.limits import SandboxError
from pipeline.types import REWARD

if TYPE_CHECKING:
    from pipeline.types import Prompt


class Reward:
    """A reward of the policy's answer."""

    path: str  # that the recipe names it by
    is_async: bool = False

    def reset(self, prompt: Prompt) -> Any:
        """Return the state that `score` gets."""
        return prompt

    def score(self, state: Any, answer: AnsweredTurn) -> Score | Awaitable[Score]:
        """Return the score of an answer, or an awaitable of it."""
        raise NotImplementedError

    def close(self) -> None:
        """End what the reward started."""


class FunctionReward(Reward):
    """A user's reward function."""

    def __init__(
        self, path: str, function: Callable[..., Any], kwargs: dict[str, Any], served_judge: ServedJudge | None = None
    ) -> None:
        """Bind to a function. kwargs: arguments besides the record's columns. Raises ValueError if it needs an absent judge."""
        self.path, self._function = path, function
        self._form, self.is_async = RewardForm(parameters_of(function)), is_async(function)
        self._kwargs = {**self._of_judge(served_judge), **kwargs}

    def _of_judge(self, judge: ServedJudge | None) -> dict[str, Any]:
        """Return the arguments of verl's form about the job's judge."""
        if not self._form.may_ask_judge:
            return {}
        if judge is None:
            if self._form.asks_judge:
                needed = next(name for name in OF_JUDGE if name in self._form.named)
                raise ValueError(f"it needs {needed}; expected a judge in the job. Try judge.model_name=MODEL")
            return {}
        arguments: dict[str, Any] = {ROUTER: judge.addresses[os.getpid() % len(judge.addresses)]}
        if JUDGE_TOKENIZER in self._form.named:
            arguments[JUDGE_TOKENIZER] = load_tokenizer(TokenizerConfig(name=judge.tokenizer))
        return arguments

    @override
    def score(self, state: Prompt, answer: AnsweredTurn) -> Score | Awaitable[Score]:
        score = Score()
        with noted(self.note(state)):
            result = self._form.call(self._function, state, answer, self._kwargs, score)
            return self._later(state, result, score) if inspect.isawaitable(result) else self._form.read(result, score)

    async def _later(self, prompt: Prompt, result: Awaitable[Any], score: Score) -> Score:
        with noted(self.note(prompt)):
            return self._form.read(await result, score)

    def note(self, prompt: Prompt) -> str:
        """Return the names of the function and the record, for errors."""
        shape = ", whose completions are messages, as data.apply_chat_template is true"
        shape = shape if self._form.name == "TRL's" and "messages" in prompt.task else ""
        return f"{self.path}{shape}; {record_of(prompt)}"


def record_of(prompt: Prompt) -> str:
    """Return the file and line of a prompt's record, or the prompt's number."""
    return prompt.task.get("location", f"prompt {prompt.index}")


@contextlib.contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note to an error that has none."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "__notes__"):
            error.add_note(note)
        raise


class KindReward(Reward):
    """The reward of a built-in kind of one turn."""

    def __init__(self, path: str, environment: Environment) -> None:
        """Bind to an environment of the kind `path`."""
        self.path, self.environment = path, environment

    @override
    def reset(self, prompt: Prompt) -> Any:
        return self.environment.reset(prompt)

    @override
    def score(self, state: Any, answer: AnsweredTurn) -> Score:
        try:
            outcome = self.environment.step_answer(state, answer)
        except (Unjudged, SandboxError, ProcessStuck):
            raise
        except Exception:
            broken = self.environment.broken("crash")
            if broken is None:
                raise
            outcome = broken
        return Score(outcome.reward, outcome.metrics, outcome.notes, outcome.extracted)

    @override
    def close(self) -> None:
        self.environment.close()


class EventLoop:
    """An event loop of this process for async rewards, which is made at the first call."""

    def __init__(self, timeout_s: float) -> None:
        """Set the limit of one call."""
        self._timeout_s = timeout_s
        self._runner: asyncio.Runner | None = None

    def run(self, awaitables: Sequence[Awaitable[Score]]) -> list[Score]:
        """Return the results of all awaitables. Raises the first error, and TimeoutError."""
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(self._all(awaitables))

    async def _all(self, awaitables: Sequence[Awaitable[Score]]) -> list[Score]:
        tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await asyncio.gather(*tasks)
        except TimeoutError as error:
            if not limit.expired():
                raise  # of a function
            raise TimeoutError(f"the reward took more than {self._timeout_s:g} s (timeout_s)") from error
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """End the loop."""
        if self._runner is not None:
            self._runner.close()


class RewardFunction(Environment):
    """Scores an answer with one function: `kind` names it."""

    def __init__(
        self,
        path: str,
        function: Callable[..., Any],
        kwargs: dict[str, Any],
        timeout_s: float,
        served_judge: ServedJudge | None = None,
    ) -> None:
        """Bind to a function. path: that the recipe names it by."""
        self._reward, self._loop = FunctionReward(path, function, kwargs, served_judge), EventLoop(timeout_s)

    @override
    def step(self, episode: Prompt, text: str) -> Outcome:
        return self.step_answer(episode, AnsweredTurn(text))

    @override
    def step_answer(self, episode: Prompt, answer: AnsweredTurn) -> Outcome:
        with noted(self._reward.note(episode)):
            score = self._reward.score(episode, answer)
            if not isinstance(score, Score):
                (score,) = self._loop.run([score])
            if score.value is None:
                raise ValueError("it returned None; expected a number, since there is no other reward")
        return Outcome(score.value, score.metrics, extracted=score.extracted, notes=score.notes)

    @override
    def close(self) -> None:
        self._loop.close()


@dataclass(frozen=True)
class Weighted:
    """One of several rewards."""

    label: str  # of its metrics
    weight: float
    reward: Reward


@dataclass(frozen=True)
class RewardsEpisode:
    """The state of one episode."""

    prompt: Prompt
    states: list[Any]  # of each reward


class Rewards(Environment):
    """Scores an answer with the weighted sum of several rewards.

    Metrics: `reward/NAME` for each reward that applies; `accuracy` of the first reward that has it; the other metrics of a
    reward as `NAME/METRIC`.
    """

    def __init__(self, parts: Sequence[Weighted], timeout_s: float) -> None:
        """Combine rewards. The limits of memory and of suspicion are the largest of the built-in kinds.

        A judge keeps all variables of its process, since functions may need them.
        """
        self._parts, self._loop = parts, EventLoop(timeout_s)
        kinds = [part.reward.environment for part in parts if isinstance(part.reward, KindReward)]
        self.workers = max((kind.workers for kind in kinds), default=1)
        limits = [getattr(kind, "limits", JudgeLimits()) for kind in kinds]
        bytes_, suspect_s = (
            max((value for limit in limits if (value := getattr(limit, name)) is not None), default=None)
            for name in ("memory_bytes", "suspect_s")
        )
        self.limits = JudgeLimits(memory_bytes=bytes_, suspect_s=suspect_s)

    @override
    def reset(self, prompt: Prompt) -> RewardsEpisode:
        return RewardsEpisode(prompt, [part.reward.reset(prompt) for part in self._parts])

    @override
    def step(self, episode: RewardsEpisode, text: str) -> Outcome:
        return self.step_answer(episode, AnsweredTurn(text))

    @override
    def step_answer(self, episode: RewardsEpisode, answer: AnsweredTurn) -> Outcome:
        scores: dict[int, Score] = {}
        waiting: dict[int, Awaitable[Score]] = {}
        for number in sorted(range(len(self._parts)), key=lambda number: self._parts[number].reward.is_async):
            score = self._parts[number].reward.score(episode.states[number], answer)
            if isinstance(score, Score):
                scores[number] = score
            else:
                waiting[number] = score
        with noted(f"{', '.join(part.reward.path for part in self._parts)}; {record_of(episode.prompt)}"):
            if waiting:
                scores |= zip(waiting, self._loop.run([*waiting.values()]), strict=True)
            return self._combined([scores[number] for number in range(len(self._parts))])

    def _combined(self, scores: Sequence[Score]) -> Outcome:
        total, metrics, notes, extracted = 0.0, {}, {}, ""
        for part, score in zip(self._parts, scores, strict=True):
            if score.value is not None:
                total += part.weight * score.value
                metrics[f"{REWARD}{part.label}"] = score.value
            for name, value in score.metrics.items():
                metrics[f"{part.label}/{name}"] = value
                if name == "accuracy":
                    metrics.setdefault(name, value)
            notes |= {f"{part.label}/{name}": text for name, text in score.notes.items()}
            extracted = extracted or score.extracted
        if not any(score.value is not None for score in scores):
            raise ValueError("no reward applies: each returned None; expected a number from one of them")
        return Outcome(total, metrics, extracted=extracted, notes=notes)

    @override
    def close(self) -> None:
        for part in self._parts:
            part.reward.close()
        self._loop.close()
