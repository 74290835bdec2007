"""Let environments judge and answer the policy's turns, in threads of this process.

Tokens become text for the environment, and its observation becomes tokens again. `EnvironmentExecutor` is what the driver sees
of the two places where environments may run: here, or in a process of their own (`environment_process.py`), in which there are
these threads again. Python runs one thread of a process at a time, so the engine waits for what environments compute in the
engine's process.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pipeline import config
from pipeline.config import EnvironmentConfig, Recipe, TokenizerConfig
from pipeline.data.chat import load_tokenizer
from pipeline.data.observations import Observations
from pipeline.environments import registry
from pipeline.environments.base import Environment, Outcome, ProcessStuck
from pipeline.rollout.environment_pool import GRACE_S, Begin, Call, CallFailure, EnvironmentPool, encodable
from pipeline.sandbox import linux
from pipeline.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    """All that environments and their tokenizer are made from."""

    env: dict[str, EnvironmentConfig]
    tokenizer: TokenizerConfig
    chat: bool  # prompts are rendered with the chat template
    turns: int  # of an episode, at most
    folders: list[str]  # where modules are looked for
    grace_s: float = GRACE_S  # see `EnvironmentPool`

    @classmethod
    def of(cls, recipe: Recipe) -> EnvironmentSettings:
        turns = config.section(recipe).max_rollout_turns
        chat = recipe.data.apply_chat_template
        return cls(recipe.env, recipe.policy.tokenizer, chat, turns, sys.path)


@dataclass(frozen=True, eq=False, slots=True)
class StepRequest:
    """One turn of the policy's, for its environment."""

    episode: str  # unique among those that are open
    title: str  # what the log calls it
    environment: str  # key under `env` in the recipe
    prompt: Prompt | None  # None after the first turn
    tokens: np.ndarray  # [C] int32
    last: bool  # the policy speaks no more after it
    room: int  # for an observation, in tokens

    def __str__(self) -> str:
        return self.title


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """An environment's answer to one turn."""

    reward: float
    metrics: dict[str, float]
    over: bool  # the environment has ended the episode
    observation: np.ndarray | None  # [O] int32; None if it is over, or if there is no room for it and a word after it


def is_final(request: StepRequest, answer: StepOutcome | CallFailure) -> bool:
    """Return whether nothing follows this answer."""
    return isinstance(answer, CallFailure) or request.last or answer.over or answer.observation is None


@dataclass(eq=False, slots=True)
class _OpenEpisode:
    """An episode that has not ended."""

    prompt: Prompt
    begun: bool = False
    state: Any = None  # the environment's, from `reset` on


class EnvStepper:
    """Steps environments with the policy's turns. `call` and `forget` are for one thread.

    observations: None where episodes have one turn.
    """

    def __init__(
        self, environments: dict[str, Environment], tokenizer: PreTrainedTokenizerBase, observations: Observations | None
    ):
        self._environments, self._tokenizer, self._observations = environments, tokenizer, observations
        self._tokenizing = threading.Lock()  # tokenizers are for one thread at a time
        self._open: dict[str, _OpenEpisode] = {}

    def call(self, request: StepRequest) -> Call:
        """Return the call for `EnvironmentPool.submit`; its result is a `StepOutcome`."""
        if request.prompt is not None:
            self._open[request.episode] = _OpenEpisode(request.prompt)
        episode = self._open[request.episode]  # a call that was given up may change it still, when it is nobody's any more
        return lambda begin: self._step(episode, request, begin)

    def forget(self, episode: str) -> None:
        """Drop what the environment holds of an episode that has ended."""
        self._open.pop(episode, None)

    def _step(self, episode: _OpenEpisode, request: StepRequest, begin: Begin) -> StepOutcome:
        environment = self._environments[request.environment]
        if not episode.begun:
            begin("reset")
            episode.state = environment.reset(episode.prompt)
            episode.begun = True
        begin("reading what was said")
        with self._tokenizing:
            text = self._tokenizer.decode(request.tokens, skip_special_tokens=True)
        begin("step")
        outcome = environment.step(episode.state, text)
        begin("its answer")
        checked = self._checked(outcome)
        if checked.over or request.last:
            return checked
        with self._tokenizing:
            ended = self._observations.ends_turn(int(request.tokens[-1]))
            observation = self._observations.within(outcome.observation, ended, request.room)
        return StepOutcome(checked.reward, checked.metrics, False, observation)

    def _checked(self, outcome: Outcome) -> StepOutcome:
        """Raises TypeError or ValueError for what is no outcome."""
        if not isinstance(outcome, Outcome):
            raise TypeError(f"step returned a {type(outcome).__name__}, not an Outcome")
        reward = float(outcome.reward)
        if not math.isfinite(reward):
            raise ValueError(f"step returned the reward {reward}")
        metrics = {encodable(str(name)): float(value) for name, value in outcome.metrics.items()}
        return StepOutcome(reward, metrics, outcome.observation is None, None)


class EnvironmentExecutor(Protocol):
    """Runs the environments of one engine. For one thread, which its `wakeup` wakes when there is something to take."""

    def submit(self, request: StepRequest) -> None:
        """Let the environment judge a turn."""

    def take(self) -> list[tuple[str, StepOutcome | CallFailure]]:
        """Return (episode, answer) of the turns that have been judged since. Does not wait.

        Raises RuntimeError if environments cannot go on.
        """

    def seconds_left(self) -> float | None:
        """Return when to `take` without wakeup; None: never."""

    def forget(self, episode: str) -> None:
        """Drop what is held of an episode that has ended. It is no error if nothing is."""

    def close(self) -> None:
        """Close the environments."""


class EnvironmentThreads:
    """Runs environments in threads of this process."""

    def __init__(self, stepper: EnvStepper, pool: EnvironmentPool) -> None:
        self._stepper, self._pool = stepper, pool

    def submit(self, request: StepRequest, judging: Callable[[bool], None] = lambda judging: None) -> None:
        """judging: told True when the turn begins to be judged, False when that has ended; in the thread that judges."""
        call = self._stepper.call(request)

        def judge(begin: Begin) -> StepOutcome:
            judging(True)
            worn_out = False
            try:
                return call(begin)
            except ProcessStuck:
                worn_out = True  # and it is judged to the process's end
                raise
            finally:
                judging(worn_out)

        self._pool.submit(request.environment, request, judge)

    def take(self) -> list[tuple[str, StepOutcome | CallFailure]]:
        answers = self._pool.take()
        for request, answer in answers:
            if is_final(request, answer):
                self._stepper.forget(request.episode)
        return [(request.episode, answer) for request, answer in answers]

    def seconds_left(self) -> float | None:
        return self._pool.seconds_left()

    def forget(self, episode: str) -> None:
        self._stepper.forget(episode)

    def close(self) -> None:
        self._pool.close()


def load(settings: EnvironmentSettings, wakeup: threading.Event) -> EnvironmentThreads:
    """Build the environments. Raises ValueError, naming the key, as `registry.build`, and as `Observations`."""
    tokenizer = load_tokenizer(settings.tokenizer)
    observations = Observations(tokenizer, settings.tokenizer, settings.chat) if settings.turns > 1 else None
    linux.raise_open_files()  # an open session of an interpreter has four
    built = registry.build(settings.env)
    limits = {name: environment.timeout_s for name, environment in settings.env.items()}
    return EnvironmentThreads(
        EnvStepper(built, tokenizer, observations), EnvironmentPool(built, limits, wakeup, settings.grace_s)
    )
