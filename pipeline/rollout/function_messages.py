"""Messages between an engine's rank and the judge that runs a user's rollout function for one episode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.types import Completion, Prompt, Sampling


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """The identity of an episode, from which its seeds derive, and its limits."""

    seed: int  # of the run
    purpose: str  # "train" or "val"
    sample: int  # of the prompt
    sampling: Sampling  # unless a call of `EngineClient.generate` says otherwise
    max_turns: int
    max_length: int  # tokens of the prompt and the episode together
    step: int = 0  # completed training steps when the episode was requested


@dataclass(frozen=True, eq=False, slots=True)
class FunctionCall:
    """A request to a judge: run the rollout function of an episode until it waits for completions, or returns.

    The first call of an episode has its prompt and its settings. Later calls bring completions. An agent, which may ask for
    draws at any time, has a call that waits for them, and gets completions by messages of this form without a reply.
    """

    episode: str  # unique among open episodes
    title: str  # its name in the log
    environment: str  # key under `env` in the recipe
    prompt: Prompt | None = None
    settings: EpisodeSettings | None = None
    completions: tuple[tuple[int, Completion], ...] = ()  # with the numbers of the draws
    cut: bool = False  # no more turns are drawn
    last: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Draw:
    """A completion that a rollout function asks for."""

    number: int  # in the episode
    tokens: np.ndarray  # [P] int32, the tokens before the completion
    seed: int
    sampling: Sampling
    previous: int | None  # number of the draw that `tokens` continue; None if they do not begin with a drawn turn


@dataclass(frozen=True, slots=True)
class TurnVerdict:
    """The judgement of a turn of the function's conversation."""

    reward: float
    malformed: bool  # see Outcome.malformed


@dataclass(frozen=True, slots=True)
class FunctionReply:
    """The state of a rollout function after a call."""

    draws: tuple[Draw, ...] = ()  # that it has asked for since the last call
    last: int | None = None  # when it has returned: the draw of the rollout's last turn; None if no turn was judged
    others: tuple[int, ...] = ()  # the last draws of the rollout's other conversations
    truncated: bool = False  # it ended because no more turns could be drawn
    verdicts: tuple[TurnVerdict, ...] = ()  # of the turns up to `last`
