"""Let environments judge the policy's turns and answer them, in threads of this process.

Tokens become text for the environment, and its observation becomes tokens again. `EnvironmentExecutor` is the driver's view of
the two places where environments may run: here, or in a process of their own (`environment_process.py`), which uses these
threads too. Python runs one thread of a process at a time, so with threads in the engine's process the engine waits while
environments compute.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from typing_extensions import override

from pipeline import config
from pipeline.config import EnvironmentConfig, Recipe, TokenizerConfig
from pipeline.data.chat import load_tokenizer
from pipeline.data.observations import Observations
from pipeline.data.stop_strings import text_before_stop
from pipeline.environments import build_environments
from pipeline.environments.environment import Environment, Outcome, ProcessStuck
from pipeline.rollout.environment_pool import GRACE_S, Begin, Call, CallFailure, EnvironmentPool, encodable
from pipeline.sandbox import linux
from pipeline.types import REWARDS, Prompt, is_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EXTRACTED_CHARACTERS = 500  # kept of an answer that an environment found in a text


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    """Settings from which environments and their tokenizer are built."""

    env: dict[str, EnvironmentConfig]
    tokenizer: TokenizerConfig
    chat: bool  # prompts are rendered with the chat template
    turns: int  # most turns of an episode
    folders: list[str]  # search path of modules
    grace_s: float = GRACE_S  # see `EnvironmentPool`

    @classmethod
    def of(cls, recipe: Recipe) -> EnvironmentSettings:
        """Return the settings of a recipe of an online algorithm."""
        turns = getattr(config.section(recipe), "max_rollout_turns")  # noqa: B009 - offline algorithms have no environments
        return cls(recipe.env, recipe.policy.tokenizer, recipe.data.apply_chat_template, turns, sys.path)


@dataclass(frozen=True, eq=False, slots=True)
class StepRequest:
    """One turn of the policy, for its environment."""

    episode: str  # unique among open episodes
    title: str  # its name in the log
    environment: str  # key under `env` in the recipe
    prompt: Prompt | None  # None after the first turn
    tokens: np.ndarray  # [C] int32
    last: bool  # it is the policy's last turn
    room: int  # most tokens of an observation
    stop: str = ""  # the stop string that ends the tokens, see `Completion.stop`

    def __str__(self) -> str:
        return self.title


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """An environment's answer to one turn."""

    reward: float
    metrics: dict[str, float]
    over: bool  # the environment has ended the episode
    observation: np.ndarray | None  # [O] int32; None if the episode is over, or there is no room for it and one more token
    extracted: str = ""  # see Outcome; at most EXTRACTED_CHARACTERS


def is_final(request: StepRequest, answer: StepOutcome | CallFailure) -> bool:
    """Return whether the episode ends with this answer."""
    return isinstance(answer, CallFailure) or request.last or answer.over or answer.observation is None


@dataclass(eq=False, slots=True)
class _OpenEpisode:
    """An episode that has not ended."""

    prompt: Prompt
    begun: bool = False
    state: Any = None  # the environment's state, from `reset` on


class EnvStepper:
    """Steps environments with the policy's turns. `call` and `forget` are for one thread.

    observations: None if episodes have one turn.
    """

    def __init__(
        self, environments: dict[str, Environment], tokenizer: PreTrainedTokenizerBase, observations: Observations | None
    ):
        self._environments, self._tokenizer, self._observations = environments, tokenizer, observations
        self._tokenizing = threading.Lock()  # a tokenizer is not thread-safe
        self._open: dict[str, _OpenEpisode] = {}

    def call(self, request: StepRequest) -> Call:
        """Return the call for `EnvironmentPool.submit`; its result is a `StepOutcome`."""
        if request.prompt is not None:
            self._open[request.episode] = _OpenEpisode(request.prompt)
        episode = self._open[request.episode]  # an abandoned call may still change it, so each call keeps its own reference
        return lambda begin: self._step(episode, request, begin)

    def forget(self, episode: str) -> None:
        """Drop the environment's state of an episode that has ended."""
        self._open.pop(episode, None)

    def _step(self, episode: _OpenEpisode, request: StepRequest, begin: Begin) -> StepOutcome:
        environment = self._environments[request.environment]
        if not episode.begun:
            begin("reset")
            episode.state = environment.reset(episode.prompt)
            episode.begun = True
        begin("decoding the answer")
        with self._tokenizing:
            text = text_before_stop(self._tokenizer, request.tokens.tolist(), request.stop)
        begin("step")
        outcome = environment.step(episode.state, text)
        begin("its answer")
        checked = self._checked(outcome)
        if checked.over or request.last:
            return checked
        assert self._observations is not None and outcome.observation is not None  # it is neither over nor the last turn
        with self._tokenizing:
            ended = self._observations.ends_turn(int(request.tokens[-1]))
            observation = self._observations.within(outcome.observation, ended, request.room)
        return StepOutcome(checked.reward, checked.metrics, False, observation, checked.extracted)

    def _checked(self, outcome: Outcome) -> StepOutcome:
        """Return the outcome of a last turn. Raises TypeError or ValueError if the environment returned no valid outcome."""
        if not isinstance(outcome, Outcome):
            raise TypeError(f"step returned a {type(outcome).__name__}, not an Outcome")
        reward = float(outcome.reward)
        if not is_reward(reward):
            raise ValueError(f"step returned the reward {reward}; expected {REWARDS}")
        metrics = {encodable(str(name)): float(value) for name, value in outcome.metrics.items()}
        extracted = encodable(str(outcome.extracted))[:EXTRACTED_CHARACTERS]
        return StepOutcome(reward, metrics, outcome.observation is None, None, extracted)


class EnvironmentExecutor(Protocol):
    """Runs the environments of one engine, for one thread, which `wakeup` signals when there is something to take."""

    def submit(self, request: StepRequest) -> None:
        """Let the environment judge a turn."""

    def take(self) -> list[tuple[str, StepOutcome | CallFailure]]:
        """Return (episode, answer) of the turns that have been judged since. Does not wait.

        Raises RuntimeError if the environments cannot continue.
        """
        ...

    def seconds_left(self) -> float | None:
        """Return the seconds until `take` must be called even without a wakeup; None: never."""
        ...

    def forget(self, episode: str) -> None:
        """Drop the state of an episode that has ended. Unknown episodes are ignored."""

    def close(self) -> None:
        """Close the environments."""


class EnvironmentThreads(EnvironmentExecutor):
    """Runs environments in threads of this process."""

    def __init__(self, stepper: EnvStepper, pool: EnvironmentPool[StepRequest]) -> None:
        self._stepper, self._pool = stepper, pool

    def submit(self, request: StepRequest, judging: Callable[[bool], None] = lambda judging: None) -> None:
        """Let the environment judge a turn.

        judging: called with True when the judgement begins and with False when it has ended, in the thread that judges.
        """
        call = self._stepper.call(request)

        def judge(begin: Begin) -> StepOutcome:
            judging(True)
            worn_out = False
            try:
                return call(begin)
            except ProcessStuck:
                worn_out = True  # its mark stays until the process ends
                raise
            finally:
                judging(worn_out)

        self._pool.submit(request.environment, request, judge)

    @override
    def take(self) -> list[tuple[str, StepOutcome | CallFailure]]:
        answers = self._pool.take()
        for request, answer in answers:
            if is_final(request, answer):
                self._stepper.forget(request.episode)
        return [(request.episode, answer) for request, answer in answers]

    @override
    def seconds_left(self) -> float | None:
        return self._pool.seconds_left()

    @override
    def forget(self, episode: str) -> None:
        self._stepper.forget(episode)

    @override
    def close(self) -> None:
        self._pool.close()


def load(settings: EnvironmentSettings, wakeup: threading.Event) -> EnvironmentThreads:
    """Build the environments. Raises the errors of `registry.build`, which name the key, and of `Observations`."""
    tokenizer = load_tokenizer(settings.tokenizer)
    observations = Observations(tokenizer, settings.tokenizer, settings.chat) if settings.turns > 1 else None
    linux.raise_open_files()  # each open session of an interpreter uses four
    built = build_environments.build(settings.env)
    limits = {name: environment.timeout_s for name, environment in settings.env.items()}
    return EnvironmentThreads(
        EnvStepper(built, tokenizer, observations), EnvironmentPool(built, limits, wakeup, settings.grace_s)
    )
