"""Check a user's class or function, and build an environment from it.

A class with `reset`, `step` and `close`, as `pipeline/environments/environment.py` describes it, is an environment. A class
with `__call__` and no `step` is built once with the kwargs, which gives a reward function. Anything else that can be called is
a reward function (`reward_forms.py`, `rewards.py`), which gets the kwargs at each call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, Literal

from pipeline.environments.environment import Environment, ServedJudge
from pipeline.environments.reward_forms import EXPECTED, RewardForm, parameters_of
from pipeline.environments.rewards import FunctionReward, RewardFunction

METHODS = ("reset", "step", "close")
Role = Literal["environment", "reward"]
"""The key that names the code: `kind`, or `fn` of an entry of `rewards`."""


def build(
    path: str, loaded: Any, kwargs: dict[str, Any], timeout_s: float, served_judge: ServedJudge | None = None
) -> Environment:
    """Build an environment from a class or a function. Raises ValueError with the result of `problem`, if any.

    path: the name of the code in the recipe. served_judge: the judge of the job.
    """
    if wrong := problem(loaded, kwargs):
        raise ValueError(wrong)
    if inspect.isclass(loaded) and not makes_reward(loaded):
        make: Any = loaded
        return make(**kwargs)
    return RewardFunction(path, *_function(loaded, kwargs), timeout_s, served_judge)


def build_reward(path: str, loaded: Any, kwargs: dict[str, Any], served_judge: ServedJudge | None = None) -> FunctionReward:
    """Build one of several rewards. Raises ValueError with the result of `problem`, if any."""
    if wrong := problem(loaded, kwargs, "reward"):
        raise ValueError(wrong)
    return FunctionReward(path, *_function(loaded, kwargs), served_judge)


def _function(loaded: Any, kwargs: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return (function, its kwargs). A class is built with the kwargs."""
    if not inspect.isclass(loaded):
        return loaded, kwargs
    make: Any = loaded
    return make(**kwargs), {}


def makes_reward(kind: type) -> bool:
    """Return whether objects of a class are reward functions, not environments."""
    is_callable = any("__call__" in base.__dict__ for base in kind.__mro__)
    return is_callable and not callable(getattr(kind, "step", None))


def problem(loaded: Any, kwargs: Collection[str], role: Role = "environment") -> str | None:
    """Return why a class or a function cannot score answers with these kwargs, or None if it can. Does not call it."""
    if inspect.isclass(loaded) and makes_reward(loaded):
        return _problem_of_arguments(loaded, kwargs) or RewardForm(parameters_of(loaded)).problem(())
    if inspect.isclass(loaded) and role == "reward" and callable(getattr(loaded, "step", None)):
        return "got an environment; expected a reward function. Try env.NAME.kind, which takes environments"
    if inspect.isclass(loaded):
        return _problem_of_environment(loaded, kwargs)
    if not callable(loaded):
        return f"got a {type(loaded).__name__}; expected a class or a function: {EXPECTED.removeprefix('expected ')}"
    return RewardForm(parameters_of(loaded)).problem(list(kwargs))


def form_of(loaded: Any) -> RewardForm | None:
    """Return the form of a reward function, or of the objects of a class; None if it is an environment."""
    if inspect.isclass(loaded) and not makes_reward(loaded):
        return None
    return RewardForm(parameters_of(loaded))


def _problem_of_environment(kind: type, kwargs: Collection[str]) -> str | None:
    if missing := [name for name in METHODS if not callable(getattr(kind, name, None))]:
        return (
            f"the class has no {' and no '.join(missing)}; expected reset(prompt), step(episode, text) and close(), or __call__"
            " of a reward function. A subclass of pipeline.environments.environment.Environment needs only step"
        )
    return _problem_of_arguments(kind, kwargs)


def _problem_of_arguments(kind: type, kwargs: Collection[str]) -> str | None:
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
