"""From `env` in the recipe to environments. `kind` is one of KINDS, or the dotted path of a user's class or function.

A kind's class is called with all its arguments: their defaults and ranges are the schema's (`pipeline/config/environments.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipeline import own_code
from pipeline.config import EnvironmentConfig, ToolArguments, arguments_of, arguments_of_tool, tools_of
from pipeline.environments import own
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
from pipeline.environments.tools import WORKERS, Tools
from pipeline.environments.verifiers import Verifiers
from pipeline.sandbox.limits import SandboxError

Configs = dict[str, EnvironmentConfig]


def _math(config: EnvironmentConfig, math_verify_impl: str) -> Environment:
    """hf_math_verify: whether math-verify finds the answers equal; dapo_math_verify: whether they are the same after Answer:"""
    return DAPOMath() if math_verify_impl == "dapo_math_verify" else Math(config.timeout_s, config.workers or 1)


def _calculator(
    config: EnvironmentConfig, configs: Configs, judge: str, open: str, close: str, reply: str, limit: int
) -> Environment:
    calls = MarkedCalls("calculator", "expression", open, close, reply)
    asked = _judge(config, configs, judge)
    return Tools({"calculator": Calculator()}, calls, asked, config.timeout_s, limit, max_calls=1, workers=config.workers)


def _tools(config: EnvironmentConfig, configs: Configs, judge: str, tools: Any, limit: int, max_calls: int) -> Environment:
    found = {name: build_tool(described) for name, described in tools_of(tools).items()}
    asked = _judge(config, configs, judge)
    return Tools(found, HermesCalls(), asked, config.timeout_s, limit, max_calls, config.workers)


KINDS: dict[str, Callable[[EnvironmentConfig, Configs, dict[str, Any]], Environment]] = {
    "calculator": lambda config, configs, given: _calculator(config, configs, **given),
    "code": lambda config, configs, given: Code(config.timeout_s, **given),
    "code_interpreter": lambda config, configs, given: CodeInterpreter(config.timeout_s, **given),
    "exact_match": lambda config, configs, given: ExactMatch(**given),
    "llm_judge": lambda config, configs, given: LLMJudge(**given, timeout_s=config.timeout_s, workers=config.workers),
    "math": lambda config, configs, given: _math(config, **given),
    "multiple_choice": lambda config, configs, given: MultipleChoice(**given),
    "reward_model": lambda config, configs, given: RewardModel(),
    "sliding_puzzle": lambda config, configs, given: SlidingPuzzle(**given),
    "tools": lambda config, configs, given: _tools(config, configs, **given),
    "verifiers": lambda config, configs, given: Verifiers(**given, timeout_s=config.timeout_s),
}

TOOLS: dict[str, Callable[..., Tool]] = {"calculator": Calculator, "python": PythonTool}


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
    ours = KINDS.get(config.kind)
    environment = ours(config, configs, arguments_of(config)) if ours else _of_users(config)
    environment.workers = config.workers or getattr(environment, "workers", 1)  # a class of the user's may say nothing
    return environment


def _judge(asking: EnvironmentConfig, configs: Configs, name: str) -> Environment:
    """One of its own: what it starts (workers, connections) is shared with nobody, and ends with who asked for it.

    Who asks waits for it within a step. So it has no more time than that, and, if nobody says how many, as many workers; but a
    class of the user's knows itself how many it can have.
    """
    if name not in configs:
        raise ValueError(f"judge: there is no env.{name}; one of: {', '.join(configs)}")
    asked = configs[name]
    workers = asked.workers or (asking.workers or WORKERS if asked.kind in KINDS else None)
    return _build(replace(asked, workers=workers, timeout_s=min(asked.timeout_s, asking.timeout_s)), configs)


def build_tool(described: ToolArguments) -> Tool:
    """Raises ValueError, SandboxError: as `build`."""
    if described.kind in TOOLS:
        return TOOLS[described.kind](**arguments_of_tool(described))
    tool = _load(described.kind, ", ".join(TOOLS))(**described.kwargs)
    if lacking := [name for name in ("open", "parameters") if not hasattr(tool, name)]:
        raise ValueError(f"tool {described.kind} has no {' and no '.join(lacking)}; see pipeline/environments/tool.py")
    return tool


def _of_users(config: EnvironmentConfig) -> Environment:
    return own.build(_load(config.kind, ", ".join(KINDS)), config.kwargs)


def _load(path: str, kinds: str) -> Any:
    if "." not in path:
        raise ValueError(f"no such kind; there are: {kinds}, or the dotted path of a class or a function")
    return own_code.load(path)
