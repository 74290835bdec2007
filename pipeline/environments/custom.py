"""Build a user's environment from a class, as `pipeline/environments/environment.py` describes it, or a plain reward function.

A reward function is called once per answer, `function(prompt, answer, **fields)`, and returns a number:

    prompt   the last text of the user; without a chat template, the bare prompt
    answer   the policy's text
    fields   the record's columns, except columns named like the function's first two parameters; `expected`, the record's
             expected answer (the column that `output_key` names), if there is one; and env.<name>.kwargs, which win

A function without `**fields` receives the fields that it has parameters for; other kwargs are refused. If it raises or does not
return a finite number, the answer is wrong and its reward 0, as in any environment; the metric `broke_judge` is the share of
such answers, and the log has the first traceback. Where wrong answers get rewards below 0, set env.<name>.broken_reward, so
that breaking the function does not pay. If it cannot judge for a reason that no answer can cause, such as a lost connection, it
raises `pipeline.environments.environment.Unjudged`, and the episode is dropped. So are episodes whose record lacks a field of a
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
        self._first, self._names, self._required = _first_two(function), fields(function), required_fields(function)

    @override
    def step(self, prompt: Prompt, text: str) -> Outcome:
        task = prompt.task
        available = {**task.get("record", {}), **({"expected": task["answer"]} if "answer" in task else {}), **self._kwargs}
        names = available if self._names is None else self._names
        arguments = {name: value for name, value in available.items() if name in names and name not in self._first}
        if missing := [name for name in self._required if name not in arguments]:
            field, function = missing[0], f"{self._function.__module__}.{self._function.__qualname__}"
            advice = f"Try env.{self._name}.kwargs.{field}=... or a column of this name"
            raise Unjudged(f"the record has no '{field}', which {function} needs. {advice}")
        reward = self._function(_last_user_text(task), text, **arguments)
        if isinstance(reward, str) or not hasattr(reward, "__float__") or not math.isfinite(reward):
            raise TypeError(f"{self._function.__qualname__} returned {reward!r}; expected a finite number")
        return Outcome(float(reward))


def _last_user_text(task: dict[str, Any]) -> str:
    if "text" in task:
        return task["text"]
    return next((message["content"] for message in reversed(task["messages"]) if message["role"] == "user"), "")


def build(name: str, class_or_function: Any, kwargs: dict[str, Any]) -> Environment:
    """Build the environment `env.<name>` from a class or a function. Raises ValueError with the result of `problem`, if any."""
    if wrong := problem(class_or_function, kwargs):
        raise ValueError(wrong)
    make: Callable[..., Environment] = class_or_function
    return make(**kwargs) if inspect.isclass(class_or_function) else RewardFunction(name, class_or_function, kwargs)


def problem(class_or_function: Any, kwargs: Collection[str]) -> str | None:
    """Return why a class or a function is not an environment with these kwargs, or None if it is. Does not call it."""
    if inspect.isclass(class_or_function):
        return _problem_of_class(class_or_function, kwargs)
    if not callable(class_or_function):
        return f"got a {type(class_or_function).__name__}; expected a class, or a function (prompt, answer, **fields) -> float"
    if inspect.iscoroutinefunction(class_or_function):
        return "got an async function; expected a plain function (prompt, answer, **fields) -> float, which runs in a thread"
    parameters = _parameters(class_or_function)
    if parameters is None:
        return None
    if {"completions", "prompts"} & set(parameters):
        return "got a function of many answers; expected a function of one answer: (prompt, answer, **fields) -> float"
    variable = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters.values())
    if sum(parameter.kind in POSITIONAL for parameter in parameters.values()) < 2 and not variable:
        return f"got parameters ({', '.join(parameters)}); expected (prompt, answer, **fields)"
    if (names := fields(class_or_function)) is not None and (unknown := [name for name in kwargs if name not in names]):
        return f"got {unknown[0]} in kwargs; expected parameters of the function: {', '.join(names) or 'none'}"
    if first := [name for name in _first_two(class_or_function) if name in kwargs]:
        return f"got {first[0]} in kwargs; expected no name of the function's first two parameters. Try another name"
    return None


def _problem_of_class(kind: type, kwargs: Collection[str]) -> str | None:
    if missing := [name for name in METHODS if not callable(getattr(kind, name, None))]:
        return (
            f"the class has no {' and no '.join(missing)}; expected reset(prompt), step(episode, text) and close(). A"
            " subclass of pipeline.environments.environment.Environment needs only step"
        )
    if abstract := sorted(getattr(kind, "__abstractmethods__", ())):
        return f"the class is abstract; expected a class that defines {' and '.join(abstract)}"
    try:
        signature = inspect.signature(kind)
    except (TypeError, ValueError):  # it has no signature to check
        return None
    try:
        signature.bind(**dict.fromkeys(kwargs))
    except TypeError as error:
        return f"kwargs do not fit {kind.__name__}{signature}: {error}"
    return None


def named_parameters(function: Callable[..., Any]) -> list[str] | None:
    """Return the names of a reward function's parameters after the prompt and the answer, without `*args` and `**fields`.

    None if the function has no signature, as some of C have none.
    """
    parameters = _parameters(function)
    if parameters is None:
        return None
    positional = [name for name, parameter in parameters.items() if parameter.kind in POSITIONAL]
    return [
        *positional[2:],
        *(name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY),
    ]


def fields(function: Callable[..., Any]) -> list[str] | None:
    """Return the names of a reward function's parameters after the prompt and the answer; None if it takes any field."""
    parameters = _parameters(function)
    if parameters is None or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return named_parameters(function)


def _first_two(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters for prompt and answer, without positional-only ones.

    Columns of a record with these names would collide with the two arguments.
    """
    parameters = _parameters(function)
    if parameters is None:
        return ["prompt", "answer"]
    positional = [parameter for parameter in parameters.values() if parameter.kind in POSITIONAL]
    return [parameter.name for parameter in positional[:2] if parameter.kind is not inspect.Parameter.POSITIONAL_ONLY]


def required_fields(function: Callable[..., Any]) -> list[str]:
    """Return the names of the `fields` that have no default."""
    parameters = _parameters(function) or {}
    return [name for name in named_parameters(function) or () if parameters[name].default is inspect.Parameter.empty]


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return None
