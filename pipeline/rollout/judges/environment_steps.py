"""Decode the policy's turns to text, let environments judge them, and encode the environments' observations to tokens."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline import config
from pipeline.config import EnvironmentConfig, PolicyConfig, Recipe, TokenizerConfig
from pipeline.data.stop_strings import text_before_stop
from pipeline.environments.environment import (
    AnsweredTurn,
    Environment,
    EpisodeFailed,
    Outcome,
    ProcessStuck,
    ServedJudge,
    Unjudged,
)
from pipeline.rollout.function_messages import FunctionReply
from pipeline.sandbox.limits import SandboxError
from pipeline.types import REWARDS, Prompt, is_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.data.observations import Observations

GRACE_S = 2.0  # extra time for an environment with a time limit of its own to end what it started
EXTRACTED_CHARACTERS = 500  # kept of an answer that an environment found in a text
NOTE_CHARACTERS = 4000  # kept of a note
FUNCTION_BEGIN, FUNCTION = "the function before its first turn", "the function"
"""Parts of a call that runs a user's rollout function."""
AGENT_BEGIN, AGENT = "the agent before its first request", "the agent"
"""Parts of a call that runs an agent."""
WAITS = "the wait for the engine"
"""Part of a call that runs an agent, without a time limit."""
PARTS_BEFORE_ANSWER = ("", "build", "reset", FUNCTION_BEGIN, AGENT_BEGIN)
"""Parts of a call before the environment sees the answer, so that the answer cannot cause a failure in them."""

Begin = Callable[[str], None]
"""A function that is called with the name of each part of a call when it begins, such as "reset" or "step".

The time limit holds for each part."""


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    """Settings from which environments and their tokenizer are built."""

    env: dict[str, EnvironmentConfig]
    tokenizer: TokenizerConfig
    chat: bool  # prompts are rendered with the chat template
    turns: int  # maximum number of turns of an episode
    folders: list[str]  # search path of modules
    max_steps: int = 0  # of the run
    grace_s: float = GRACE_S
    apart: dict[str, int] = field(default_factory=dict)  # environments that each judge builds for itself -> their workers
    function: str = ""  # dotted path of the user's rollout function; "": the built-in rollout
    judge: ServedJudge | None = None  # the generative judge that the job serves
    policy: PolicyConfig | None = None  # of environments with agents
    tool_parser: str | None = None  # see `CallParser`
    reasoning_parser: str | None = None

    @classmethod
    def of(cls, recipe: Recipe, judge: ServedJudge | None = None) -> EnvironmentSettings:
        """Return the settings of a recipe of an online algorithm. judge: the generative judge that the job serves."""
        section: Any = config.section(recipe)  # of an algorithm that samples
        chat, steps = recipe.data.apply_chat_template, getattr(section, "max_num_steps", 0)  # an evaluation has no steps
        parts = recipe.env, recipe.policy.tokenizer, chat, section.max_rollout_turns, sys.path, steps
        generation, function = recipe.policy.generation, config.rollout_function(recipe)
        parsers: Any = {"tool_parser": generation.tool_parser, "reasoning_parser": generation.reasoning_parser}
        policy = recipe.policy if config.agents(recipe.env) else None
        return cls(*parts, function=function, judge=judge, policy=policy, **parsers)


@dataclass(frozen=True, eq=False, slots=True)
class StepRequest:
    """A request to an environment to judge one turn of the policy."""

    episode: str  # unique among open episodes
    title: str  # its name in the log
    environment: str  # key under `env` in the recipe
    prompt: Prompt | None  # None after the first turn
    tokens: np.ndarray  # [C] int32
    last: bool  # it is the policy's last turn
    room: int  # maximum number of tokens of an observation
    stop: str = ""  # the stop string that ends the tokens, see `Completion.stop`
    step: int = 0  # see `RolloutWork.step`
    thought: bool = False  # see `AnsweredTurn`


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """An environment's answer to one turn."""

    reward: float
    metrics: dict[str, float]
    over: bool  # the environment has ended the episode
    observation: np.ndarray | None  # [O] int32; None if the episode is over, or there is no room for it and one more token
    extracted: str = ""  # see Outcome; at most EXTRACTED_CHARACTERS
    notes: dict[str, str] = field(default_factory=dict)  # see Outcome; each at most NOTE_CHARACTERS
    function: FunctionReply | None = None  # of a rollout function
    malformed: bool = False  # see Outcome


def judge_answer(environment: Environment, episode: Any, answer: AnsweredTurn) -> Outcome:
    """Return the environment's outcome of an answer. A user's class may have `step` alone."""
    step_answer = getattr(environment, "step_answer", None)
    return environment.step(episode, answer.text) if step_answer is None else step_answer(episode, answer)


GOES_ON = np.zeros(0, np.int32)
"""The observation of an outcome of a rollout function that waits for completions."""


@dataclass(frozen=True, slots=True)
class CallFailure:
    """The failure of a call, which has no outcome."""

    why: str
    of_answer: bool = False  # an answer can cause it, and is then wrong
    notes: dict[str, str] = field(default_factory=dict)  # see Outcome


def is_final(last: bool, answer: StepOutcome | CallFailure) -> bool:
    """Return whether the episode ends with this answer. last: whether the answer is to the policy's last turn."""
    return isinstance(answer, CallFailure) or last or answer.over or answer.observation is None


class EnvStepper:
    """Steps an environment with the policy's turns.

    observations: encodes the environment's observations to tokens; None if episodes have one turn.
    """

    def __init__(
        self,
        environment: Environment,
        tokenizer: PreTrainedTokenizerBase,
        observations: Observations | None,
        max_steps: int = 0,
    ) -> None:
        self.environment, self._tokenizer, self._observations = environment, tokenizer, observations
        self._max_steps = max_steps
        self._states: dict[str, Any] = {}  # of the environment, for each open episode
        self._options: dict[str, dict[str, Any]] = {}  # of the chat template, for each open episode

    def step(self, request: StepRequest, begin: Begin) -> StepOutcome:
        """Return the environment's answer to a turn. Raises the environment's errors and those of `checked_outcome`.

        begin: called with the name of each part of the call when the part begins.
        """
        if request.prompt is not None:
            begin("reset")
            self._states[request.episode] = self.environment.reset(request.prompt)
            self._options[request.episode] = request.prompt.task.get("template_options") or {}
        begin("decoding the answer")
        tokens = request.tokens.tolist()
        text = text_before_stop(self._tokenizer, tokens, request.stop)
        begin("step")
        state = self._states[request.episode]
        answer = AnsweredTurn(text, tuple(tokens), request.step, self._max_steps, request.thought)
        outcome = judge_answer(self.environment, state, answer)
        begin("its answer")
        checked = checked_outcome(outcome)
        if checked.over or request.last:
            return checked
        assert self._observations is not None and outcome.observation is not None  # it is neither over nor the last turn
        variables = dict(self._options[request.episode])
        tools = variables.pop("tools", None)
        after = int(request.tokens[-1])
        observation = self._observations.within(outcome.observation, after, request.room, outcome.turn, tools, variables)
        return replace(checked, over=False, observation=observation)

    def forget(self, episode: str) -> None:
        """Drop the environment's state of an episode that has ended."""
        self._states.pop(episode, None)
        self._options.pop(episode, None)


def checked_outcome(outcome: Outcome) -> StepOutcome:
    """Return the outcome in the form for a last turn, without an observation.

    Raises EpisodeFailed, TypeError or ValueError if the environment returned no valid outcome.
    """
    if not isinstance(outcome, Outcome):
        raise EpisodeFailed(f"step returned a {type(outcome).__name__}; expected an Outcome")
    reward = float(outcome.reward)
    if not is_reward(reward):
        raise EpisodeFailed(f"the outcome has the reward {reward}; expected {REWARDS}")
    metrics = {encodable(str(name)): float(value) for name, value in outcome.metrics.items()}
    extracted = encodable(str(outcome.extracted))[:EXTRACTED_CHARACTERS]
    over, malformed = outcome.observation is None, bool(outcome.malformed)
    return StepOutcome(reward, metrics, over, None, extracted, _kept(outcome.notes), malformed=malformed)


def _kept(notes: Mapping[str, str]) -> dict[str, str]:
    return {encodable(str(name)): encodable(str(text))[:NOTE_CHARACTERS] for name, text in notes.items()}


def failure_of(error: BaseException, part: str) -> CallFailure:
    """Return the failure of a call in which `error` was raised. part: the part of the call that raised it."""
    of_answer = part not in PARTS_BEFORE_ANSWER and not isinstance(error, Unjudged | SandboxError)
    if isinstance(error, ProcessStuck):
        of_answer = error.caused_by_answer
    if isinstance(error, EpisodeFailed):
        when = " (before its first request)" if part == AGENT_BEGIN else ""
        return CallFailure(encodable(f"{_in_a_line(error)}{when}"), of_answer and error.of_answer, _kept(error.notes))
    who = AGENT if part == WAITS else part or "it"
    return CallFailure(f"{who} raised {brief(error)}", of_answer)


def brief(error: BaseException) -> str:
    """Return one line with an error's type, its message, the place where it was raised, and its notes."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    notes = f" ({'; '.join(map(_in_a_line, error.__notes__))})" if hasattr(error, "__notes__") else ""
    return encodable(f"{type(error).__name__}: {_in_a_line(error)}{where}{notes}")


def _in_a_line(text: object) -> str:
    return " ".join(str(text).split())[:500]


def encodable(text: str) -> str:
    """Return the text with escapes for what UTF-8 cannot encode: lone surrogates, which a model can write in JSON."""
    return text.encode(errors="backslashreplace").decode()
