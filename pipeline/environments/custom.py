"""The user's own environments: a class as `pipeline/environments/environment.py` describes it, or a plain reward function.

A reward function is called once per answer, `function(prompt, answer, **fields)`, and returns a number:

    prompt   the last text of the user; without a chat template, the bare prompt
    answer   the policy's text
    fields   the record's columns, except those named like the function's first two parameters; `expected`, the record's
             expected answer (the column that `output_key` names), if it has one; and env.<name>.kwargs

A function without `**fields` receives the fields that it has parameters for. If it raises or does not return a finite number,
the answer is wrong and its reward 0, as in any environment; the metric `broke_judge` is the share of such answers, and the log
has the first traceback. Where wrong answers get rewards below 0, set env.<name>.broken_reward, so that breaking the function
does not pay. If it cannot judge for a reason that no answer can cause, such as a lost connection, it raises
`pipeline.environments.environment.Unjudged`, and the episode is dropped. So are episodes whose record lacks a field of a
parameter without a default.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from pipeline.environments.environment import Environment, Outcome, Unjudged

if TYPE_CHECKING:
    from pipeline.types import Prompt

METHODS = ("reset", "step", "close")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class RewardFunction(Environment):
    """Computes the reward of an answer with a function."""

    def __init__(self, name: str, function: Callable[..., float], kwargs: dict[str, Any]) -> None:
        """Build the environment `env.<name>`."""
        self._name, self._function, self._kwargs = name, function, kwargs
        self._first, self._names, self._required = _first_two(function), fields(function), required(function)

    @override
    def step(self, prompt: Prompt, text: str) -> Outcome:
        task = prompt.task
        given = {**task.get("record", {}), **({"expected": task["answer"]} if "answer" in task else {}), **self._kwargs}
        names = given if self._names is None else self._names
        taken = {name: value for name, value in given.items() if name in names and name not in self._first}
        if lacking := [name for name in self._required if name not in taken]:
            field, function = lacking[0], f"{self._function.__module__}.{self._function.__qualname__}"
            advice = f"Try env.{self._name}.kwargs.{field}=... or a column of that name"
            raise Unjudged(f"the record has no '{field}', which {function} needs. {advice}")
        reward = self._function(_last_user_text(task), text, **taken)
        if isinstance(reward, str) or not hasattr(reward, "__float__") or not math.isfinite(reward):
            raise TypeError(f"{self._function.__qualname__} returned {reward!r}; expected a finite number")
        return Outcome(float(reward))


def _last_user_text(task: dict[str, Any]) -> str:
    if "text" in task:
        return task["text"]
    return next((message["content"] for message in reversed(task["messages"]) if message["role"] == "user"), "")


def build(name: str, thing: Any, kwargs: dict[str, Any]) -> Environment:
    """Return the environment `env.<name>` of a class or a function. Raises ValueError with what is wrong."""
    if wrong := problem(thing, kwargs):
        raise ValueError(wrong)
    make: Callable[..., Environment] = thing
    return make(**kwargs) if inspect.isclass(thing) else RewardFunction(name, thing, kwargs)


def problem(thing: Any, kwargs: Collection[str]) -> str | None:
    """Return why a class or a function is not an environment with these kwargs, without calling it; None if it is one."""
    if inspect.isclass(thing):
        return _problem_of_class(thing, kwargs)
    if not callable(thing):
        return f"got a {type(thing).__name__}; expected a class, or a function (prompt, answer, **fields) -> float"
    if inspect.iscoroutinefunction(thing):
        return "got an async function; expected a plain function (prompt, answer, **fields) -> float, which runs in a thread"
    parameters = _parameters(thing)
    if parameters is None:
        return None
    if {"completions", "prompts"} & set(parameters):
        return "got a function of many answers; expected one of a single answer: (prompt, answer, **fields) -> float"
    variable = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters.values())
    if sum(one.kind in POSITIONAL for one in parameters.values()) < 2 and not variable:
        return f"got parameters ({', '.join(parameters)}); expected (prompt, answer, **fields)"
    if (names := fields(thing)) is not None and (unknown := [name for name in kwargs if name not in names]):
        return f"got {unknown[0]} in env's kwargs; expected parameters of the function: {', '.join(names) or 'none'}"
    return None


def _problem_of_class(kind: type, kwargs: Collection[str]) -> str | None:
    if lacking := [name for name in METHODS if not callable(getattr(kind, name, None))]:
        return (
            f"the class has no {' and no '.join(lacking)}; expected reset(prompt), step(episode, text) and close(). One that"
            " derives from pipeline.environments.environment.Environment needs only step"
        )
    if abstract := sorted(getattr(kind, "__abstractmethods__", ())):
        return f"the class is abstract; expected it to define {' and '.join(abstract)}"
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError):  # it has no signature to check
        return None
    try:
        signature.bind(**dict.fromkeys(kwargs))
    except TypeError as error:
        return f"kwargs do not fit {kind.__name__}{signature}: {error}"
    return None


def fields(function: Callable[..., Any]) -> list[str] | None:
    """Return the names that a reward function takes besides the prompt and the answer; None if it takes any."""
    parameters = _parameters(function)
    if parameters is None or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return None
    positional = [name for name, one in parameters.items() if one.kind in POSITIONAL]
    return [*positional[2:], *(name for name, one in parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY)]


def _first_two(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters for prompt and answer, unless they are positional-only.

    Fields of the same name would collide with them.
    """
    parameters = _parameters(function)
    if parameters is None:
        return ["prompt", "answer"]
    positional = [one for one in parameters.values() if one.kind in POSITIONAL]
    return [one.name for one in positional[:2] if one.kind is not inspect.Parameter.POSITIONAL_ONLY]


def required(function: Callable[..., Any]) -> list[str]:
    """Return the names of `fields` without a default."""
    parameters = _parameters(function) or {}
    positional = [name for name, one in parameters.items() if one.kind in POSITIONAL]
    others = [*positional[2:], *(name for name, one in parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY)]
    return [name for name in others if parameters[name].default is inspect.Parameter.empty]


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return None
