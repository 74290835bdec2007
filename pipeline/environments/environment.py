"""The interface of environments, which judge the policy's answers and reply to them.

An episode begins with `reset` and a prompt. The policy answers, and `step` judges the answer and may reply. The episode ends
with an outcome without an observation, or when it has no more turns or tokens. Its reward is the sum over its turns.

A policy learns to break its judge if that pays. So a failure that an answer can cause makes the answer wrong and the episode's
reward 0: an exception of `step`, a step that exceeds its time, a judge that ends during the step. Only a failure that no
answer can cause drops the episode: an exception of `reset`, which has not seen the answer, or `Unjudged`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pipeline.recipe.problems import Problem
from pipeline.recipe.values import Check, Text

if TYPE_CHECKING:
    from pipeline.data.call_parsers import CallParser
    from pipeline.types import Prompt


THOUGHT_ENDS = "</think>"
"""The end of a policy's reasoning. Several kinds read the answer after it."""


class Unjudged(RuntimeError):
    """Raised if no answer could be judged: for example, a service is down, or the task has no expected answer."""


class EpisodeFailed(RuntimeError):
    """Raised if an episode fails in a way that an environment knows. Reports show the message alone, without a traceback.

    notes: texts that the rollout shows, see `Outcome`. of_answer: False for a failure that no answer can cause, as `Unjudged`.
    """

    def __init__(self, message: str, of_answer: bool = True) -> None:
        super().__init__(message)
        self.of_answer = of_answer
        self.notes: dict[str, str] = {}


class ProcessStuck(RuntimeError):
    """Raised if calls hang in a judge, which must then be replaced. caused_by_answer: True if an answer is the cause."""

    def __init__(self, message: str, caused_by_answer: bool = False) -> None:
        super().__init__(message)
        self.caused_by_answer = caused_by_answer


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one turn."""

    reward: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of the last turn count, and a training step reports their means. `accuracy` is shown beside the reward, and
    `reward/NAME` is one of several rewards, which GDPO normalizes on their own."""
    observation: dict[str, Any] | list[dict[str, Any]] | None = None
    """The reply to the policy: a message {"role", "content"}, or several, such as results of calls. None: the episode ends."""
    extracted: str = ""  # the text's answer in a normal form, the same for equal answers; "": none
    notes: dict[str, str] = field(default_factory=dict)  # texts that the run's rollouts show beside the answer
    turn: dict[str, Any] | None = None  # the policy's turn as a message with `tool_calls`, if the observation has their results
    malformed: bool = False  # the turn cannot be used, as with a malformed tool call; the loss can mask or penalize it
    of_turns: tuple[float, ...] = ()
    """The rewards of each turn of an agent's last conversation, whose sum is `reward`. (): the last turn has it all."""


@dataclass(frozen=True, slots=True)
class AnsweredTurn:
    """The policy's text of one turn, and what a reward function may read besides."""

    text: str
    tokens: tuple[int, ...] | None = None  # of the text, with its stop token; None if only the text is known
    step: int = 0  # completed training steps when the episode was requested
    max_steps: int = 0  # of the run
    thought: bool = False  # the policy thought before, in a turn of its own


@dataclass(frozen=True, slots=True)
class JudgeLimits:
    """Limits of the processes in which an environment judges, besides `env.<name>.timeout_s`."""

    call_s: float | None = None  # of one call; None: `timeout_s`, and a little more to end what the call started
    memory_bytes: int | None = None  # of address space, beyond what the environment has loaded
    suspect_s: float | None = None
    """CPU seconds of a call. A judge is replaced after a call that fails or takes more."""
    variables: tuple[str, ...] | None = None  # variables of the process environment that a judge keeps; None: all


class Environment(Protocol):
    """Scores answers. A class that derives from it inherits all methods that are not abstract.

    It is built once beside each engine. Each episode runs in a judge, a fork of that process, from `reset` to its last
    `step`; then the judge takes the next episode. So an episode has a copy of the object, and episodes do not share what they
    change. They share the processes and connections that the constructor opened. If the constructor starts a thread, each
    judge calls it for itself.

    A `step` that raises, ends its judge, or takes longer than `env.<name>.timeout_s`, makes its answer wrong. A judge is killed
    after that time.
    """

    workers: int = 1
    """Number of judges that may be in `reset` or `step` at the same time."""
    limits: JudgeLimits = JudgeLimits()
    """Further limits of a judge."""

    def reset(self, prompt: Prompt) -> Any:
        """Begin an episode and return its state, which `step` receives and may change. The default state is the prompt."""
        return prompt

    @abstractmethod
    def step(self, episode: Any, text: str) -> Outcome:
        """Judge the policy's text and reply. May take seconds.

        Raises Unjudged for failures that no answer can cause; the episode is then dropped. Other exceptions make the answer
        wrong.
        """
        ...

    def step_answer(self, episode: Any, answer: AnsweredTurn) -> Outcome:
        """Judge an answer as `step` does. Override it to read more of the answer than its text."""
        return self.step(episode, answer.text)

    def broken(self, how: str) -> Outcome | None:
        """Return the outcome of an answer that broke its judge, or None to count it as wrong. how: "timeout" or "crash"."""
        return None

    def close(self) -> None:
        """End what the environment started. The last call: it comes in each judge, and then in the process that forked them."""


# ---- built-in environments and tools -----------------------------------------------------------------------------------------


@dataclass
class NoArguments:
    """The arguments of an environment without kwargs."""


class Configurable:
    """A built-in environment or tool. It describes its kwargs, so that they are checked before submission."""

    Arguments: ClassVar[type] = NoArguments
    """A dataclass with a field for each of the kwargs: its type, range, default and description.

    A field without a default is a required argument: submission refuses a recipe that lacks it. A field `judge` names the
    environment that judges the final answer.
    """

    package: ClassVar[str] = ""
    """Optional package that it imports; "" if there is none. `pip install '.[KIND]'` installs it, or '.[PACKAGE]' of a tool."""

    @classmethod
    def check(cls, key: str, arguments: Any) -> Iterator[Problem]:
        """Yield problems that depend on several fields of the arguments. key: of the kwargs, such as `env.math.kwargs`."""
        yield from ()


@dataclass(frozen=True, slots=True)
class ServedJudge:
    """The generative judge that the job serves: an OpenAI-compatible endpoint of each of its engines."""

    addresses: tuple[str, ...]  # HOST:PORT/KEY; the key admits to the endpoint, so no message repeats it
    tokenizer: str  # its folder

    @property
    def urls(self) -> tuple[str, ...]:
        """The address of chat completions of each engine."""
        return tuple(f"http://{address}/v1/chat/completions" for address in self.addresses)


@dataclass(frozen=True, slots=True)
class AgentAccess:
    """How an agent reaches the policy in one episode: an endpoint of OpenAI's and Anthropic's form, and its secret."""

    url: str  # http://HOST:PORT; OpenAI's base URL is this and /v1
    key: str
    socket: str = ""  # path of a Unix socket of the same endpoint

    @property
    def variables(self) -> dict[str, str]:
        """The variables from which OpenAI's and Anthropic's clients read the address and the key."""
        openai = {"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_BASE": f"{self.url}/v1", "OPENAI_API_KEY": self.key}
        return {**openai, "ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": self.key}


@dataclass(frozen=True)
class EnvironmentContext:
    """Everything that an environment gets besides its arguments."""

    timeout_s: float  # for one turn
    workers: int | None  # turns judged at the same time; None: the environment's own default
    build: Callable[
        [str], Environment
    ]  # builds another environment by its key under `env`; nobody shares it; raises RecipeError
    served_judge: ServedJudge | None = None  # None: the job serves none
    call_parser: CallParser | None = None  # of the policy's turns; None if no environment `reads_calls`


class BuiltinEnvironment(Configurable, Environment):
    """An environment with a name in KINDS of pipeline/config/environments.py."""

    checked_at_start: ClassVar[int] = 20_000
    """Number of a data set's expected answers that `check_answer` checks before the run. It checks the others when used."""
    is_final: ClassVar[bool] = True
    """True if this environment can judge final answers for another environment, such as one with tools."""
    reads_calls: ClassVar[bool] = False
    """True if it needs `EnvironmentContext.call_parser`."""

    def __init__(self, arguments: Any, context: EnvironmentContext) -> None:
        """Build the environment. Raises ValueError for arguments that this machine cannot serve."""

    @classmethod
    def build(cls, arguments: Any, context: EnvironmentContext) -> Environment:
        """Return the environment for these arguments; a subclass may choose another class."""
        return cls(arguments, context)

    @classmethod
    def needs_answers(cls, arguments: Any) -> bool:
        """Return whether records must have an expected answer."""
        return True

    @classmethod
    def tool_schemas(cls, arguments: Any, own_code: bool) -> list[dict[str, Any]]:
        """Return the tools that prompts show, as JSON schemas in OpenAI's form.

        own_code: whether to run the user's code, which may describe tools. Else these are left out.
        """
        return []

    @classmethod
    def check_answer(cls, answer: str, arguments: Any) -> None:
        """Raise ValueError if texts cannot be judged by the expected answer `answer`. Its record then counts as bad."""


class AgentEnvironment(BuiltinEnvironment):
    """An environment whose agent plays its episodes: it asks the policy through an endpoint, as often as it likes.

    All that the policy says in an episode is learned with the episode's reward. `timeout_s` bounds the time between two of the
    agent's requests. If `play` raises, the episode counts as wrong, or is dropped if the policy has said nothing yet.
    """

    is_final = False
    workers = 256

    @classmethod
    def needs_answers(cls, arguments: Any) -> bool:
        """Return False: an agent's reward need not come from an expected answer."""
        return False

    @abstractmethod
    async def play(self, prompt: Prompt, access: AgentAccess, seed: int) -> Outcome:
        """Run the agent of one episode to its end and return the episode's outcome.

        access: of the endpoint, until this returns. seed: of the episode, the same after a restart. If the episode is cut, this
        is cancelled, and must end what it started.
        """
        ...

    def step(self, episode: Any, text: str) -> Outcome:
        """Raise TypeError: an agent judges its own episodes."""
        raise TypeError("an agent plays whole episodes; expected no call of step")


def _pattern_error(pattern: str) -> str | None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        return f"got '{pattern}'; expected a regular expression: {error}"
    return f"got '{pattern}' with {groups} groups; expected at most one group" if groups > 1 else None


Pattern = Annotated[Text, Check(_pattern_error)]
"""A regular expression. The match of its only group counts, or the whole match if it has no group."""


def requires_placeholder(placeholder: str) -> Check:
    """Return the check that a text contains a placeholder such as `{}`."""
    return Check(lambda text: None if placeholder in text else f"expected a string with {placeholder} in it")
