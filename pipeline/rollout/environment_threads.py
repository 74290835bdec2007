"""Where the environments of an engine run, as the driver sees it, and the first of two places: threads of this process.

The other one is a process of their own (`environment_process.py`), in which there are these threads again. Python runs one
thread of a process at a time, so what environments compute in the engine's process, the engine waits for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pipeline import config
from pipeline.config import EnvironmentConfig, Recipe, TokenizerConfig
from pipeline.data.chat import load_tokenizer
from pipeline.data.observations import Observations
from pipeline.environments import registry
from pipeline.environments.base import WornOut
from pipeline.rollout.environment_pool import GRACE_S, Begin, EnvironmentPool, Failure
from pipeline.rollout.hearing import Heard, Hearing, Said, ends
from pipeline.sandbox import kernel


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    """What environments and their tokenizer are made from."""

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


class EnvironmentExecutor(Protocol):
    """Runs the environments of one engine. For one thread, which its `news` wakes when there is something to take."""

    def submit(self, said: Said) -> None:
        """Let the environment hear a turn."""

    def take(self) -> list[tuple[str, Heard | Failure]]:
        """Return (episode, answer) of the turns that have been heard since. Does not wait.

        Raises RuntimeError if environments cannot go on.
        """

    def seconds_left(self) -> float | None:
        """Return when to `take` without news; None: never."""

    def forget(self, episode: str) -> None:
        """Drop what is held of an episode that has ended. It is no error if nothing is."""

    def close(self) -> None:
        """Close the environments."""


class EnvironmentThreads:
    """Runs environments in threads of this process."""

    def __init__(self, hearing: Hearing, pool: EnvironmentPool) -> None:
        self._hearing, self._pool = hearing, pool

    def submit(self, said: Said, judging: Callable[[bool], None] = lambda judging: None) -> None:
        """judging: told True when the turn begins to be judged, False when that has ended; in the thread that judges."""
        call = self._hearing.call(said)

        def judge(begin: Begin) -> Heard:
            judging(True)
            worn_out = False
            try:
                return call(begin)
            except WornOut:
                worn_out = True  # and it is judged to the process's end
                raise
            finally:
                judging(worn_out)

        self._pool.submit(said.environment, said, judge)

    def take(self) -> list[tuple[str, Heard | Failure]]:
        answers = self._pool.take()
        for said, answer in answers:
            if ends(said, answer):
                self._hearing.forget(said.episode)
        return [(said.episode, answer) for said, answer in answers]

    def seconds_left(self) -> float | None:
        return self._pool.seconds_left()

    def forget(self, episode: str) -> None:
        self._hearing.forget(episode)

    def close(self) -> None:
        self._pool.close()


def load(settings: EnvironmentSettings, news: threading.Event) -> EnvironmentThreads:
    """Build the environments. Raises ValueError, naming the key, as `registry.build`, and as `Observations`."""
    tokenizer = load_tokenizer(settings.tokenizer)
    observations = Observations(tokenizer, settings.tokenizer, settings.chat) if settings.turns > 1 else None
    kernel.raise_open_files()  # an open session of an interpreter has four
    built = registry.build(settings.env)
    limits = {name: environment.timeout_s for name, environment in settings.env.items()}
    return EnvironmentThreads(Hearing(built, tokenizer, observations), EnvironmentPool(built, limits, news, settings.grace_s))
