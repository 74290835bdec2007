"""Environments of the user's own: a class as `pipeline/environments/base.py` describes it, or a plain function for a reward.

A function is called once for each answer, `function(prompt, answer, **fields)`, and returns a number:

    prompt   the text that the user says last; without a chat template, the bare prompt
    answer   what the policy said
    fields   the record's columns, but for any that are called as one of the function's first two parameters; `expected`, the
             record's expected answer (the column that `output_key` names), if it has one; and env.<name>.kwargs

A function without `**fields` receives those that it has parameters for. One that raises, or returns no finite number, makes the
answer a wrong one of reward 0, as any environment does: `broke_judge` in the metrics is the share of them, and the log has the
first one's traceback. Where wrong answers are paid less than 0, env.<name>.broken_reward says how much, so that it does not pay
to break the function. One that cannot judge through no doing of the answer (no connection, say) raises
`pipeline.environments.base.Unjudged`, and the episode is left out.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from pipeline.environments.base import Environment, Outcome

if TYPE_CHECKING:
    from pipeline.types import Prompt

METHODS = ("reset", "step", "close")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class RewardFunction(Environment):
    """Rewards an answer by a function."""

    def __init__(self, function: Callable[..., float], kwargs: dict[str, Any]) -> None:
        self._function, self._kwargs = function, kwargs
        self._first, self._names = _first_two(function), fields(function)

    def step(self, prompt: Prompt, text: str) -> Outcome:
        task = prompt.task
        given = {**task.get("record", {}), **({"expected": task["answer"]} if "answer" in task else {}), **self._kwargs}
        names = given if self._names is None else self._names
        taken = {name: value for name, value in given.items() if name in names and name not in self._first}
        reward = self._function(_asked(task), text, **taken)
        if isinstance(reward, str) or not hasattr(reward, "__float__") or not math.isfinite(reward):
            raise TypeError(f"{self._function.__qualname__} returned {reward!r}; expected a finite number")
        return Outcome(float(reward))


def _asked(task: dict[str, Any]) -> str:
    if "text" in task:
        return task["text"]
    return next((message["content"] for message in reversed(task["messages"]) if message["role"] == "user"), "")


def build(thing: Any, kwargs: dict[str, Any]) -> Environment:
    """Return the environment that a class or a function makes. Raises ValueError, saying what is wrong."""
    if wrong := problem(thing, kwargs):
        raise ValueError(wrong)
    return thing(**kwargs) if inspect.isclass(thing) else RewardFunction(thing, kwargs)


def problem(thing: Any, kwargs: Collection[str]) -> str | None:
    """Return what keeps a class or a function from being an environment with these kwargs. Nothing is called."""
    if inspect.isclass(thing):
        return _problem_of_class(thing, kwargs)
    if not callable(thing):
        return f"it is a {type(thing).__name__}; an environment is a class, or a function (prompt, answer, **fields) -> float"
    if inspect.iscoroutinefunction(thing):
        return (
            "it is an async function, and rewards are computed in threads; a plain function (prompt, answer, **fields) -> float"
        )
    parameters = _parameters(thing)
    if parameters is None:
        return None
    if {"completions", "prompts"} & set(parameters):
        return "it takes many answers at once; a reward here is of one: (prompt, answer, **fields) -> float"
    variable = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters.values())
    if sum(one.kind in POSITIONAL for one in parameters.values()) < 2 and not variable:
        return f"it takes ({', '.join(parameters)}); a reward function takes (prompt, answer, **fields)"
    if (names := fields(thing)) is not None and (unknown := [name for name in kwargs if name not in names]):
        return f"it has no parameter {unknown[0]} for env's kwargs; it has: {', '.join(names) or 'none'}"
    return None


def _problem_of_class(kind: type, kwargs: Collection[str]) -> str | None:
    if lacking := [name for name in METHODS if not callable(getattr(kind, name, None))]:
        return (
            f"the class has no {' and no '.join(lacking)}; an environment has reset(prompt), step(episode, text), close(), of"
            " which one that derives from pipeline.environments.base.Environment need only write step"
        )
    if abstract := sorted(getattr(kind, "__abstractmethods__", ())):
        return f"the class is abstract: it must write {' and '.join(abstract)}"
    try:
        signature = inspect.signature(kind)
        signature.bind(**dict.fromkeys(kwargs))
    except TypeError as error:
        return f"kwargs do not fit {kind.__name__}{signature}: {error}"
    except ValueError:  # it has no signature to look at
        return None
    return None


def fields(function: Callable[..., Any]) -> list[str] | None:
    """Return the names that a reward function takes beside the prompt and the answer; None: any."""
    parameters = _parameters(function)
    if parameters is None or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return None
    positional = [name for name, one in parameters.items() if one.kind in POSITIONAL]
    return [*positional[2:], *(name for name, one in parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY)]


def _first_two(function: Callable[..., Any]) -> list[str]:
    """Return the names of the parameters that take the prompt and the answer, where a field could be given by such a name
    too.
    """
    parameters = _parameters(function)
    if parameters is None:
        return ["prompt", "answer"]
    positional = [one for one in parameters.values() if one.kind in POSITIONAL]
    return [one.name for one in positional[:2] if one.kind is not inspect.Parameter.POSITIONAL_ONLY]


def required(function: Callable[..., Any]) -> list[str]:
    """Return the names of `fields` that have no default."""
    parameters = _parameters(function) or {}
    positional = [name for name, one in parameters.items() if one.kind in POSITIONAL]
    others = [*positional[2:], *(name for name, one in parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY)]
    return [name for name in others if parameters[name].default is inspect.Parameter.empty]


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of a builtin
        return None
