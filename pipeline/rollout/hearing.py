"""What an environment makes of what the policy said: run in the environment's threads, beside the engine.

Here tokens become text for the environment, and its answer becomes tokens again. What it returns is checked, so that an
environment which returns nonsense fails its episode there and then.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from pipeline.data.observations import Observations
from pipeline.environments.base import Environment, Outcome
from pipeline.rollout.environment_pool import Begin, Call
from pipeline.rollout.episode import Episode


@dataclass(frozen=True, slots=True)
class Heard:
    """An environment's answer to one turn."""

    reward: float
    metrics: dict[str, float]
    over: bool  # the environment has ended the episode
    observation: np.ndarray | None  # [O] int32; None if it is over, or if there is no room for it and a word after it


class Hearing:
    """observations: None where episodes have one turn. max_length: tokens of a prompt and all that follows."""

    def __init__(
        self,
        environments: dict[str, Environment],
        tokenizer: PreTrainedTokenizerBase,
        observations: Observations | None,
        max_length: int,
    ):
        self._environments, self._tokenizer = environments, tokenizer
        self._observations, self._max_length = observations, max_length
        self._tokenizing = threading.Lock()  # tokenizers are for one thread at a time

    def call(self, episode: Episode) -> Call:
        """For `EnvironmentPool.submit`; its result is a `Heard`. Until it has ended the episode is nobody else's."""
        return lambda begin: self._hear(episode, begin)

    def _hear(self, episode: Episode, begin: Begin) -> Heard:
        environment, said = self._environments[episode.prompt.environment], episode.said
        state = episode.state
        if not episode.turns:
            begin("reset")
            state = environment.reset(episode.prompt)
        begin("reading what was said")
        with self._tokenizing:
            text = self._tokenizer.decode(said.tokens, skip_special_tokens=True)
        begin("step")
        outcome = environment.step(state, text)
        begin("its answer")
        heard = self._checked(outcome)
        observation = None
        if not heard.over and not episode.last_turn:
            room = self._max_length - len(episode.tokens) - len(said.tokens) - 1
            with self._tokenizing:
                ended = self._observations.ends_turn(int(said.tokens[-1]))
                observation = self._observations.within(outcome.observation, ended, room)
        episode.state = state
        return Heard(heard.reward, heard.metrics, heard.over, observation)

    def _checked(self, outcome: Outcome) -> Heard:
        """Raises TypeError or ValueError for what is no outcome."""
        if not isinstance(outcome, Outcome):
            raise TypeError(f"step returned a {type(outcome).__name__}, not an Outcome")
        reward = float(outcome.reward)
        if not math.isfinite(reward):
            raise ValueError(f"step returned the reward {reward}")
        metrics = {str(name): float(value) for name, value in outcome.metrics.items()}
        return Heard(reward, metrics, outcome.observation is None, None)
