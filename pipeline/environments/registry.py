"""From `env` in the recipe to environments. `kind` is one of KINDS, or the dotted path of a user's class."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from pipeline.config import MATH_VERIFIERS, EnvironmentConfig, tools_of
from pipeline.environments.base import Environment
from pipeline.environments.calculator import Calculator
from pipeline.environments.code import Code, CodeInterpreter
from pipeline.environments.dapo_math import DAPOMath
from pipeline.environments.exact_match import ExactMatch
from pipeline.environments.llm_judge import LLMJudge
from pipeline.environments.math import Math
from pipeline.environments.multiple_choice import MultipleChoice
from pipeline.environments.python_tool import PythonTool
from pipeline.environments.reward_model import RewardModel
from pipeline.environments.sliding_puzzle import SlidingPuzzle
from pipeline.environments.tool import Tool
from pipeline.environments.tool_calls import HermesCalls, MarkedCalls
from pipeline.environments.tools import Tools
from pipeline.environments.verifiers import Verifiers
from pipeline.sandbox.limits import SandboxError

Configs = dict[str, EnvironmentConfig]


def _math(config: EnvironmentConfig, math_verify_impl: str = "hf_math_verify") -> Environment:
    """hf_math_verify: whether math-verify finds the answers equal; dapo_math_verify: whether they are the same after Answer:"""
    if math_verify_impl not in MATH_VERIFIERS:
        raise ValueError(f"math_verify_impl: '{math_verify_impl}' is not one of: {', '.join(MATH_VERIFIERS)}")
    return DAPOMath() if math_verify_impl == "dapo_math_verify" else Math(config.timeout_s, config.workers or 1)


def _llm_judge(config: EnvironmentConfig, **kwargs: Any) -> Environment:
    given = {name: value for name, value in kwargs.items() if value is not None}
    return LLMJudge(timeout_s=config.timeout_s, **({"workers": config.workers} if config.workers else {}), **given)


def _calculator(
    config: EnvironmentConfig,
    configs: Configs,
    judge: str,
    open: str = "<calculator>",
    close: str = "</calculator>",
    reply: str = "{}",
    limit: int = 4096,
) -> Environment:
    calls = MarkedCalls("calculator", "expression", open, close, reply)
    return Tools({"calculator": Calculator()}, calls, _judge(configs, judge), config.timeout_s, limit)


def _tools(
    config: EnvironmentConfig, configs: Configs, judge: str, tools: Any, limit: int = 4096, max_calls: int = 8
) -> Environment:
    found = {name: _tool(described.kind, described.kwargs) for name, described in tools_of(tools).items()}
    return Tools(found, HermesCalls(), _judge(configs, judge), config.timeout_s, limit, max_calls)


KINDS: dict[str, Callable[[EnvironmentConfig, Configs], Environment]] = {
    "calculator": lambda config, configs: _calculator(config, configs, **config.kwargs),
    "code": lambda config, configs: Code(config.timeout_s, **config.kwargs),
    "code_interpreter": lambda config, configs: CodeInterpreter(config.timeout_s, **config.kwargs),
    "exact_match": lambda config, configs: ExactMatch(**config.kwargs),
    "llm_judge": lambda config, configs: _llm_judge(config, **config.kwargs),
    "math": lambda config, configs: _math(config, **config.kwargs),
    "multiple_choice": lambda config, configs: MultipleChoice(**config.kwargs),
    "reward_model": lambda config, configs: RewardModel(**config.kwargs),
    "sliding_puzzle": lambda config, configs: SlidingPuzzle(**config.kwargs),
    "tools": lambda config, configs: _tools(config, configs, **config.kwargs),
    "verifiers": lambda config, configs: Verifiers(timeout_s=config.timeout_s, **config.kwargs),
}


def build(configs: Configs) -> dict[str, Environment]:
    """The environments by their key under `env`. A user's class is called with `kwargs`.

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
    environment = KINDS[config.kind](config, configs) if config.kind in KINDS else _of_class(config)
    environment.workers = config.workers or getattr(environment, "workers", 1)  # a class of the user's may say nothing
    return environment


def _judge(configs: Configs, name: str) -> Environment:
    """One of its own: what it starts (workers, connections) is shared with nobody, and ends with who asked for it."""
    if name not in configs:
        raise ValueError(f"judge: there is no env.{name}; one of: {', '.join(configs)}")
    return _build(configs[name], configs)


def _tool(kind: str, kwargs: dict[str, Any]) -> Tool:
    if kind == "calculator":
        return Calculator(**kwargs)
    if kind == "python":
        return PythonTool(**kwargs)
    tool = _load(kind, "calculator, python")(**kwargs)
    if lacking := [name for name in ("open", "parameters") if not hasattr(tool, name)]:
        raise ValueError(f"tool {kind} has no {' and no '.join(lacking)}; see pipeline/environments/tool.py")
    return tool


def _of_class(config: EnvironmentConfig) -> Environment:
    environment = _load(config.kind, ", ".join(KINDS))(**config.kwargs)
    methods = [name for name in ("reset", "step", "close") if not callable(getattr(environment, name, None))]
    if methods:
        raise ValueError(
            f"the class has no {' and no '.join(methods)}; an environment has reset(prompt), step(episode, text), close(), of"
            " which one that derives from pipeline.environments.base.Environment need only write step"
        )
    return environment


def _load(path: str, kinds: str) -> type:
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"no such kind; there are: {kinds}, or the dotted path of a class")
    try:
        return getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"no such class: {error}") from error
