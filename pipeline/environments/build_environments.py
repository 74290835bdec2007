"""Build the environments that `env` in the recipe describes.

`kind` is one of KINDS (pipeline/config/environments.py), or the path of a user's class or function. In place of it, an
environment may have several `rewards`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from pipeline.config import KINDS, EnvironmentConfig, kind_class, read_kwargs
from pipeline.config.environments import AnswerScorer, scorers
from pipeline.data.call_parsers import CallParser
from pipeline.environments import custom
from pipeline.environments.environment import Environment, EnvironmentContext, ServedJudge
from pipeline.environments.rewards import KindReward, Reward, Rewards, Weighted
from pipeline.recipe import user_code
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.recipe.values import not_a_kind
from pipeline.sandbox.limits import SandboxError

Made = TypeVar("Made")
Configs = dict[str, EnvironmentConfig]
JUDGE_WORKERS = 16
"""Workers of a built-in environment that judges for another environment, if neither sets a number."""


def build(
    configs: Configs,
    names: Collection[str] | None = None,
    served_judge: ServedJudge | None = None,
    call_parser: CallParser | None = None,
) -> dict[str, Environment]:
    """Build environments, and return their name under `env` -> environment. names: the environments to build; None: all.

    A user's class is called with `kwargs`. call_parser: needed by kinds that read tool calls.

    Raises RecipeError for an unknown kind, a class that is not an environment, kwargs that do not fit, and a node on which no
    sandbox works.
    """
    environments: dict[str, Environment] = {}
    for name in configs if names is None else names:
        try:
            environments[name] = _build(name, configs[name], configs, served_judge, call_parser)
        except RecipeError:
            for environment in environments.values():
                environment.close()
            raise
    return environments


def _build(
    name: str, config: EnvironmentConfig, configs: Configs, served: ServedJudge | None, calls: CallParser | None = None
) -> Environment:
    named, key = scorers(name, config), f"env.{name}"
    if config.rewards:
        parts = [
            Weighted(scorer.reward.label, scorer.reward.weight, _reward(scorer, config, served))
            for scorer in named
            if scorer.reward is not None
        ]
        environment: Environment = Rewards(parts, config.timeout_s)
    elif not named:
        raise RecipeError(Problem(f"{key}.kind", "missing-value", "got null; expected a kind"))
    elif named[0].kind in KINDS:
        environment = _built_in(
            named[0], config, lambda judge: _build_judge(key, config, configs, judge, served), served, calls
        )
    else:
        environment = _own(
            named[0], lambda loaded: custom.build(named[0].kind, loaded, named[0].kwargs, config.timeout_s, served)
        )
    environment.workers = config.workers or getattr(environment, "workers", 1)  # a user's class may lack it
    return environment


def _reward(scorer: AnswerScorer, config: EnvironmentConfig, served: ServedJudge | None) -> Reward:
    if scorer.kind in KINDS:
        return KindReward(scorer.kind, _built_in(scorer, config, _no_judge, served))
    return _own(scorer, lambda loaded: custom.build_reward(scorer.kind, loaded, scorer.kwargs, served))


def _no_judge(judge: str) -> Environment:
    raise ValueError(f"got judge {judge}; expected a kind of one turn")


def _built_in(
    scorer: AnswerScorer,
    config: EnvironmentConfig,
    judge: Callable[[str], Environment],
    served: ServedJudge | None,
    calls: CallParser | None = None,
) -> Environment:
    arguments, problems = read_kwargs(scorer.kwargs_key, scorer.kind, scorer.kwargs)
    if problems:
        raise RecipeError(*problems)
    context = EnvironmentContext(config.timeout_s, config.workers, judge, served, calls)
    with _refused(scorer, "unsupported"):
        return kind_class(scorer.kind).build(arguments, context)


def _own(scorer: AnswerScorer, make: Callable[[Any], Made]) -> Made:
    """Return what `make` makes of the user's code."""
    if unknown := not_a_kind(scorer.kind, KINDS, files=True):
        raise RecipeError(Problem(scorer.key, "not-a-choice", unknown))
    with _refused(scorer, "wrong-type"):
        try:
            return make(user_code.load(scorer.kind))
        except user_code.NotFound as error:
            raise RecipeError(Problem(scorer.key, "not-importable", str(error))) from error


@contextlib.contextmanager
def _refused(scorer: AnswerScorer, code: str) -> Iterator[None]:
    """Convert the errors of a constructor to problems of the recipe."""
    try:
        yield
    except RecipeError:
        raise
    except (TypeError, ValueError, SandboxError) as error:
        key = scorer.key.removesuffix(".kind").removesuffix(".fn")
        raise RecipeError(Problem(key, code, f"kind {scorer.kind}: {error}")) from error


def _build_judge(key: str, config: EnvironmentConfig, configs: Configs, judge: str, served: ServedJudge | None) -> Environment:
    """Build the environment `judge` as the judge of the environment at `key`, with its own workers and connections.

    The environment at `key` waits for its judge within a step, so the judge's timeout_s is at most that environment's. A judge
    without `workers` gets as many as the environment at `key`, or else JUDGE_WORKERS. A user's class chooses its own number.
    """
    if judge not in configs:
        message = f"got '{judge}'; expected one of: {', '.join(configs)}"
        raise RecipeError(Problem(f"{key}.kwargs.judge", "not-a-choice", message))
    judge_config = configs[judge]
    workers = judge_config.workers or (config.workers or JUDGE_WORKERS if judge_config.kind in KINDS else None)
    return _build(
        judge, replace(judge_config, workers=workers, timeout_s=min(judge_config.timeout_s, config.timeout_s)), configs, served
    )
