"""Build the environments that `env` in the recipe describes.

`kind` is one of KINDS (pipeline/config/environments.py), or the dotted path of a user's class or function.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from pipeline.config import KINDS, EnvironmentConfig, kind_class, read_kwargs
from pipeline.environments import custom
from pipeline.environments.environment import Environment, EnvironmentContext
from pipeline.recipe import user_code
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.recipe.values import not_a_kind
from pipeline.sandbox.limits import SandboxError

Configs = dict[str, EnvironmentConfig]
JUDGE_WORKERS = 16
"""Workers of a built-in environment that judges for another environment, if neither sets a number."""


def build(configs: Configs, names: Collection[str] | None = None) -> dict[str, Environment]:
    """Build environments, and return their name under `env` -> environment. names: the environments to build; None: all.

    A user's class is called with `kwargs`.

    Raises RecipeError for an unknown kind, a class that is not an environment, kwargs that do not fit, and a node on which no
    sandbox works.
    """
    environments: dict[str, Environment] = {}
    for name in configs if names is None else names:
        try:
            environments[name] = _build(name, configs[name], configs)
        except RecipeError:
            for environment in environments.values():
                environment.close()
            raise
    return environments


def _build(name: str, config: EnvironmentConfig, configs: Configs) -> Environment:
    key, code = f"env.{name}", "wrong-type"
    try:
        if config.kind in KINDS:
            arguments, problems = read_kwargs(f"{key}.kwargs", config)
            if problems:
                raise RecipeError(*problems)
            context = EnvironmentContext(
                config.timeout_s, config.workers, lambda judge: _build_judge(key, config, configs, judge)
            )
            code = "unsupported"
            environment = kind_class(config.kind).build(arguments, context)
        elif unknown := not_a_kind(config.kind, KINDS):
            raise RecipeError(Problem(f"{key}.kind", "not-a-choice", unknown))
        else:
            environment = custom.build(name, _load(f"{key}.kind", config.kind), config.kwargs)
    except RecipeError:
        raise
    except (TypeError, ValueError, SandboxError) as error:
        raise RecipeError(Problem(key, code, f"kind {config.kind}: {error}")) from error
    environment.workers = config.workers or getattr(environment, "workers", 1)  # a user's class may lack it
    return environment


def _load(key: str, path: str) -> object:
    try:
        return user_code.load(path)
    except user_code.NotFound as error:
        raise RecipeError(Problem(key, "not-importable", str(error))) from error


def _build_judge(key: str, config: EnvironmentConfig, configs: Configs, judge: str) -> Environment:
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
        judge, replace(judge_config, workers=workers, timeout_s=min(judge_config.timeout_s, config.timeout_s)), configs
    )
