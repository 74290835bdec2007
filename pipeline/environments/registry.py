"""From `env` in the recipe to environments. `kind` is one of KINDS, or the dotted path of a user's class."""

from __future__ import annotations

import importlib

from pipeline.config import MATH_VERIFIERS, EnvironmentConfig
from pipeline.environments.base import Environment
from pipeline.environments.dapo_math import DAPOMath
from pipeline.environments.exact_match import ExactMatch
from pipeline.environments.math import Math
from pipeline.environments.reward_model import RewardModel


def _math(timeout_s: float, math_verify_impl: str = "hf_math_verify") -> Environment:
    """hf_math_verify: whether math-verify finds the answers equal; dapo_math_verify: whether they are the same after Answer:"""
    if math_verify_impl not in MATH_VERIFIERS:
        raise ValueError(f"math_verify_impl: '{math_verify_impl}' is not one of: {', '.join(MATH_VERIFIERS)}")
    return DAPOMath() if math_verify_impl == "dapo_math_verify" else Math(timeout_s)


KINDS = {
    "exact_match": lambda config: ExactMatch(**config.kwargs),
    "math": lambda config: _math(config.timeout_s, **config.kwargs),
    "reward_model": lambda config: RewardModel(**config.kwargs),
}


def build(configs: dict[str, EnvironmentConfig]) -> dict[str, Environment]:
    """The environments by their key under `env`. A user's class is called with `kwargs`.

    Raises ValueError, naming the key, for a kind that does not exist and for kwargs that do not fit.
    """
    environments: dict[str, Environment] = {}
    for name, config in configs.items():
        try:
            environments[name] = KINDS[config.kind](config) if config.kind in KINDS else _load(config.kind)(**config.kwargs)
        except (TypeError, ValueError) as error:
            for built in environments.values():
                built.close()
            raise ValueError(f"env.{name} (kind {config.kind}): {error}") from error
    return environments


def _load(path: str) -> type[Environment]:
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"no such kind; there are: {', '.join(KINDS)}, or the dotted path of a class")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"no such class: {error}") from error
