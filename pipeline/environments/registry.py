"""Build the environments that `env` in the recipe describes.

`kind` is one of KINDS (pipeline/config/environments.py), or the dotted path of a user's class or function.
"""

from __future__ import annotations

from dataclasses import replace

from pipeline import user_code
from pipeline.config import KINDS, EnvironmentConfig, kind_class, read_kwargs
from pipeline.environments import custom
from pipeline.environments.base import Environment, EnvironmentContext
from pipeline.sandbox.limits import SandboxError

Configs = dict[str, EnvironmentConfig]
JUDGES = 16
"""Workers of an environment of ours that judges for another one, if neither has a number."""


def build(configs: Configs) -> dict[str, Environment]:
    """Return the environments by their key under `env`. A user's class is called with `kwargs`.

    Raises ValueError, naming the key, for a kind that does not exist, a class that is no environment, kwargs that do not fit,
    and where code could not be contained on this node.
    """
    environments: dict[str, Environment] = {}
    for name, config in configs.items():
        try:
            environments[name] = _build(config, configs)
        except (TypeError, ValueError, SandboxError) as error:
            for built in environments.values():
                built.close()
            raise ValueError(f"env.{name} (kind {config.kind}): {error}") from error
    return environments


def _build(config: EnvironmentConfig, configs: Configs) -> Environment:
    if config.kind in KINDS:
        arguments, problems = read_kwargs("kwargs", config)
        if problems:
            raise ValueError("; ".join(map(str, problems)))
        setup = EnvironmentContext(config.timeout_s, config.workers, lambda name: _for_another(config, configs, name))
        environment = kind_class(config.kind).build(arguments, setup)
    elif "." not in config.kind:
        raise ValueError(f"no such kind; there are: {', '.join(KINDS)}, or the dotted path of a class or a function")
    else:
        environment = custom.build(user_code.load(config.kind), config.kwargs)
    environment.workers = config.workers or getattr(environment, "workers", 1)  # a class of the user's may say nothing
    return environment


def _for_another(asking: EnvironmentConfig, configs: Configs, name: str) -> Environment:
    """Return an environment for one that asks it: what it starts (workers, connections) is shared with nobody.

    Who asks waits for it within a step. So it has no more time than that, and, if nobody says how many, as many workers; but a
    class of the user's knows itself how many it can have.
    """
    if name not in configs:
        raise ValueError(f"judge: there is no env.{name}; one of: {', '.join(configs)}")
    asked = configs[name]
    workers = asked.workers or (asking.workers or JUDGES if asked.kind in KINDS else None)
    return _build(replace(asked, workers=workers, timeout_s=min(asked.timeout_s, asking.timeout_s)), configs)
