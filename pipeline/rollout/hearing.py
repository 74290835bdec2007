"""What an environment makes of what the policy said: run in the environment's threads.

Here tokens become text for the environment, and its answer becomes tokens again. What it returns is checked there and then.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.environments.base import Environment, Outcome
from pipeline.rollout.environment_pool import Begin, Call, Failure, encodable
from pipeline.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.data.observations import Observations


@dataclass(frozen=True, eq=False, slots=True)
class Said:
    """One turn of the policy's, as its environment hears it."""

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
class Heard:
    """An environment's answer to one turn."""

    reward: float
    metrics: dict[str, float]
    over: bool  # the environment has ended the episode
    observation: np.ndarray | None  # [O] int32; None if it is over, or if there is no room for it and a word after it


def ends(said: Said, answer: Heard | Failure) -> bool:
    """Return whether nothing follows this answer."""
    return isinstance(answer, Failure) or said.last or answer.over or answer.observation is None


@dataclass(eq=False, slots=True)
class _Open:
    """An episode that has not ended."""

    prompt: Prompt
    begun: bool = False
    state: Any = None  # the environment's, from `reset` on


class Hearing:
    """`observations`: None where episodes have one turn. `call` and `forget` are for one thread."""

    def __init__(
        self,
        environments: dict[str, Environment],
        tokenizer: PreTrainedTokenizerBase,
        observations: Observations | None,
    ):
        self._environments, self._tokenizer, self._observations = environments, tokenizer, observations
        self._tokenizing = threading.Lock()  # tokenizers are for one thread at a time
        self._open: dict[str, _Open] = {}

    def call(self, said: Said) -> Call:
        """Return what `EnvironmentPool.submit` takes; its result is a `Heard`."""
        if said.prompt is not None:
            self._open[said.episode] = _Open(said.prompt)
        episode = self._open[said.episode]  # a call that was given up may change it still, when it is nobody's any more
        return lambda begin: self._hear(episode, said, begin)

    def forget(self, episode: str) -> None:
        """Drop what the environment holds of an episode that has ended."""
        self._open.pop(episode, None)

    def _hear(self, episode: _Open, said: Said, begin: Begin) -> Heard:
        environment = self._environments[said.environment]
        if not episode.begun:
            begin("reset")
            episode.state = environment.reset(episode.prompt)
            episode.begun = True
        begin("reading what was said")
        with self._tokenizing:
            text = self._tokenizer.decode(said.tokens, skip_special_tokens=True)
        begin("step")
        outcome = environment.step(episode.state, text)
        begin("its answer")
        heard = self._checked(outcome)
        if heard.over or said.last:
            return heard
        with self._tokenizing:
            ended = self._observations.ends_turn(int(said.tokens[-1]))
            observation = self._observations.within(outcome.observation, ended, said.room)
        return Heard(heard.reward, heard.metrics, False, observation)

    def _checked(self, outcome: Outcome) -> Heard:
        """Raises TypeError or ValueError for what is no outcome."""
        if not isinstance(outcome, Outcome):
            raise TypeError(f"step returned a {type(outcome).__name__}, not an Outcome")
        reward = float(outcome.reward)
        if not math.isfinite(reward):
            raise ValueError(f"step returned the reward {reward}")
        metrics = {encodable(str(name)): float(value) for name, value in outcome.metrics.items()}
        return Heard(reward, metrics, outcome.observation is None, None)
