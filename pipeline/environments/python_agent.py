"""An async function of yours plays each episode: it asks the policy through OpenAI's client.

    async def play(client, task):
        answer = await client.chat.completions.create(model="policy", messages=task["messages"])
        return float(task["answer"] in answer.choices[0].message.content)

Each episode has a process of its own, so a function that hangs or crashes costs its own episode. A function that needs another
client reads the endpoint from `client.base_url` and `client.api_key`.
"""

from __future__ import annotations

import contextlib
import inspect
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from pipeline.environments.environment import AgentAccess, AgentEnvironment, EnvironmentContext, EpisodeFailed, Outcome
from pipeline.recipe import user_code
from pipeline.recipe.values import MISSING, Text
from pipeline.types import REWARDS

if TYPE_CHECKING:
    from pipeline.types import Prompt

SIGNATURE = "async def play(client, task)"


@dataclass
class PythonAgentArguments:
    """The kwargs of `kind: python_agent`."""

    function: Text = MISSING
    """Dotted path of the function, or FILE.py:NAME: async (client, task, ...) -> a reward, {reward or rewards, metrics}, or an
    Outcome. `rewards` are those of the turns of its last conversation, in order."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the function."""


class PythonAgent(AgentEnvironment):
    """Calls a function per episode."""

    Arguments = PythonAgentArguments

    def __init__(self, arguments: PythonAgentArguments, context: EnvironmentContext) -> None:
        """Import the function and OpenAI's client. Raises ValueError for what is no such function."""
        import openai  # vLLM brings it; other environments do without

        try:
            self._function = user_code.load(arguments.function)
        except user_code.NotFound as error:
            raise ValueError(f"function: {error}") from error
        if wrong := problem(self._function, arguments.kwargs):
            raise ValueError(f"function: {wrong}")
        self._client, self._kwargs = openai.AsyncOpenAI, arguments.kwargs

    @override
    async def play(self, prompt: Prompt, access: AgentAccess, seed: int) -> Outcome:
        """Call the function. Raises what it raises, and EpisodeFailed if it returns no reward."""
        async with self._client(base_url=f"{access.url}/v1", api_key=access.key, max_retries=0, timeout=None) as client:
            result = await self._function(client, dict(prompt.task), **self._kwargs)
        if isinstance(result, Outcome):
            return result
        if isinstance(result, int | float):
            return Outcome(float(result))
        if isinstance(result, Mapping) and result.keys() & {"reward", "rewards"}:
            with contextlib.suppress(TypeError, ValueError):
                of_turns = tuple(map(float, result.get("rewards") or ()))
                metrics = {str(name): float(value) for name, value in dict(result.get("metrics") or {}).items()}
                return Outcome(float(result.get("reward", sum(of_turns))), metrics, of_turns=of_turns)
        expected = f"{REWARDS}, {{reward or rewards, metrics}} of numbers, or an Outcome"
        raise EpisodeFailed(f"the function returned {reprlib.repr(result)}; expected {expected}")


def problem(function: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Return why an object is no function of an agent that takes `kwargs`, or None if it is one. Does not call it."""
    if not inspect.iscoroutinefunction(function):
        return f"got a {type(function).__name__} that is not async; expected {SIGNATURE}"
    try:
        inspect.signature(function).bind(None, {}, **kwargs)
    except TypeError as error:
        return f"got parameters {inspect.signature(function)}; expected (client, task) and kwargs: {error}"
    return None
