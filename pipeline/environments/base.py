"""The interface of environments, which judge what the policy says, and answer it.

An episode begins with `reset` and a prompt; the policy speaks, `step` judges and perhaps answers, and so on until an outcome
has no observation, or the episode has no more turns or tokens. Its reward is the sum over its turns.

A policy learns to break its judge if that pays. So a failure that an answer can cause makes the answer a wrong one, and the
episode's reward 0: what `step` raises, a step that outlasts its time, a process that ends while it judges. Only a failure that
no answer can cause leaves an episode out: what `reset` raises, which has not seen the answer, and `Unjudged`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pipeline.problems import Problem
from pipeline.values import Check, Text

if TYPE_CHECKING:
    from pipeline.types import Prompt


class Unjudged(RuntimeError):
    """The answer was not judged, and not through its own doing: a service is gone, the task has no expected answer."""


class ProcessStuck(RuntimeError):
    """Nothing can end the calls that hang in this process; another must replace it. caused_by_answer: an answer hangs it."""

    def __init__(self, why: str, caused_by_answer: bool = False) -> None:
        super().__init__(why)
        self.caused_by_answer = caused_by_answer


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one turn."""

    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # the last turn's are the episode's; a step reports their means
    observation: dict[str, str] | None = None  # what the policy is told: {"role", "content"}; None: the episode is over


class Environment(Protocol):
    """One object serves all episodes of its kind on an engine. To derive from it gives what is not abstract here.

    It runs in threads of a process beside the engine; of the engine's own with policy.generation.environment_process=false. A
    `step` that raises, takes longer than `env.<name>.timeout_s` or ends the process makes its answer a wrong one. A step that
    outlasts its time should end itself, as nothing else can end a thread.
    """

    workers: int = 1  # how many episodes may be in `reset` or `step` at once; 1: one at a time

    def reset(self, prompt: Prompt) -> Any:
        """Begin an episode: all that `step` is to know of it, and may change. The prompt itself, if nothing more is needed."""
        return prompt

    @abstractmethod
    def step(self, episode: Any, text: str) -> Outcome:
        """Judge what the policy said, and answer. May take seconds, and may be called from any thread.

        Raises Unjudged for what no answer can cause; the episode is then left out. Anything else makes the answer a wrong one.
        """

    def close(self) -> None:
        """End what the environment started. It is not used afterwards."""


# ---- environments and tools with a name of their own -------------------------------------------------------------------------


@dataclass
class NoArguments:
    """No kwargs."""


class Configurable:
    """Something with a name of its own in a recipe. It describes its kwargs, so that they are checked before submission."""

    Arguments: ClassVar[type] = NoArguments
    """A dataclass: type, range, default and meaning of each of the kwargs stand at its field. `judge`, if it has one, names the
    environment that judges the final answer."""

    @classmethod
    def check(cls, key: str, arguments: Any) -> Iterator[Problem]:
        """Yield the problems of arguments that their fields cannot express. key: of the kwargs, such as `env.math.kwargs`."""
        yield from ()


@dataclass(frozen=True)
class EnvironmentContext:
    """All that an environment is told besides its arguments."""

    timeout_s: float  # for one turn
    workers: int | None  # turns judged at once; None: its own number
    build: Callable[[str], Environment]  # another environment by its key under `env`, for this one alone; ValueError: none


class BuiltinEnvironment(Configurable, Environment):
    """An environment that a recipe names by one word: see KINDS in pipeline/config/environments.py."""

    is_final: ClassVar[bool] = True
    """True if this kind can judge the final answer of another environment, such as one with tools."""

    def __init__(self, arguments: Any, setup: EnvironmentContext) -> None:
        """Raises ValueError for what cannot be used here."""

    @classmethod
    def build(cls, arguments: Any, setup: EnvironmentContext) -> Environment:
        return cls(arguments, setup)

    @classmethod
    def check_answer(cls, answer: str) -> None:
        """Raises ValueError if nothing can be judged by an expected answer."""


def _not_a_pattern(pattern: str) -> str | None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"got '{pattern}', which is no regular expression: {error}"
    return f"got '{pattern}' with {groups} groups; expected one at most, which is what counts" if groups > 1 else None


Pattern = Annotated[Text, Check(_not_a_pattern)]
"""A regular expression of which all counts, or its only group."""


def requires_placeholder(place: str) -> Check:
    """Return the check that a text has a place, such as `{}`, for what goes into it."""
    return Check(lambda text: None if place in text else f"expected a text with {place} in it")
