"""The recipe's keys of environments, `env.<name>`, and the kinds of environments that have a name of their own.

A new kind is one file in `pipeline/environments/` and one line in KINDS. Its class describes and checks its `kwargs`
(`pipeline/environments/base.py`). Only modules of kinds that a recipe names are imported. The kwargs of a user's own code are
checked where that is imported: `pipeline/environments/custom.py`.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline import user_code
from pipeline.config import schema_validation
from pipeline.config.policy import Precision, TokenizerConfig
from pipeline.problems import Problem
from pipeline.values import MISSING, Bool, Check, Float, Line, Positive, Text, interpolation, not_a_kind

KINDS = {
    "calculator": "pipeline.environments.tools.CalculatorEnvironment",
    "code": "pipeline.environments.code.Code",
    "code_interpreter": "pipeline.environments.code.CodeInterpreter",
    "exact_match": "pipeline.environments.exact_match.ExactMatch",
    "llm_judge": "pipeline.environments.llm_judge.LLMJudge",
    "math": "pipeline.environments.math.Math",
    "multiple_choice": "pipeline.environments.multiple_choice.MultipleChoice",
    "reward_model": "pipeline.environments.reward_model.RewardModelEnvironment",
    "sliding_puzzle": "pipeline.environments.sliding_puzzle.SlidingPuzzle",
    "tools": "pipeline.environments.tools.Tools",
    "verifiers": "pipeline.environments.verifiers.Verifiers",
}


@dataclass
class RewardTokenizerConfig(TokenizerConfig):
    """The reward model's tokenizer and its chat template."""

    name: Annotated[Line | None, Field(description="null: the one in the reward model's folder.")] = None  # type: ignore[assignment]


@dataclass
class EnvironmentConfig:
    """An environment: how answers are judged, and what a policy can do before its answer.

    model_name and the keys after it are for kind reward_model.
    """

    kind: Annotated[
        Text,
        Check(lambda kind: not_a_kind(kind, KINDS), "not-a-choice"),
        Field(description=f"One of {', '.join(KINDS)}; or the dotted path of a class or a function of your own."),
    ] = MISSING
    timeout_s: Annotated[Float, Field(gt=0, description="Seconds for one turn of an episode.")] = 10.0
    workers: Annotated[
        Positive | None, Field(description="Turns that are judged at once, on each engine. null: the kind's own number.")
    ] = None
    broken_reward: Annotated[
        Float,
        Field(description="Reward of an answer that breaks its judge. For kinds of your own that pay less for wrong ones."),
    ] = 0.0
    kwargs: Annotated[dict[str, Any], Field(description="Arguments of the kind.")] = field(default_factory=dict)
    model_name: Annotated[
        Line | None, Field(description="What algorithm rm left in a run's hf/, or any sequence classifier with one label.")
    ] = None
    tokenizer: RewardTokenizerConfig = field(default_factory=RewardTokenizerConfig)
    hf_config_overrides: Annotated[dict[str, Any], Field(description="Keys of the model's config.json to change.")] = field(
        default_factory=dict
    )
    precision: Annotated[Precision, Field(description="As policy.precision.")] = interpolation("${policy.precision}")
    served_by: Annotated[
        Literal["train", "reward"],
        Field(description="train: the train ranks, cut as the policy is. reward: ranks of its own, cluster.reward."),
    ] = "train"
    cpu_offload: Annotated[
        Bool, Field(description="served_by=train: keep its weights in host memory while it does not compute.")
    ] = True


Environments = Mapping[str, EnvironmentConfig]
"""By their key under `env`."""


@functools.cache
def kind_class(kind: str) -> Any:
    """Return the class of one of KINDS, which derives from `pipeline.environments.base.BuiltinEnvironment`."""
    return user_code.load(KINDS[kind])


def read_kwargs(key: str, environment: EnvironmentConfig) -> tuple[Any, list[Problem]]:
    """Return the arguments of an environment of one of KINDS, defaults included, and the problems of its kwargs at `key`."""
    kind = kind_class(environment.kind)
    arguments, problems = schema_validation.validate_mapping(kind.Arguments, key, environment.kwargs)
    return arguments, problems or list(kind.check(key, arguments))


def judged_by_own_code(environments: Environments, name: str | None) -> bool:
    """Return whether code of the user's own judges the answers of an environment: its own, or that of the judge it asks."""
    if name not in environments:
        return False
    asked = environments.get(environments[name].kwargs.get("judge"), environments[name])
    return asked.kind not in KINDS


def check_environments(environments: Environments) -> Iterator[Problem]:
    """Yield the problems of kwargs, by themselves and against other environments."""
    for name, environment in environments.items():
        if environment.kind not in KINDS:
            continue
        key = f"env.{name}.kwargs"
        arguments, problems = read_kwargs(key, environment)
        for problem in problems:
            yield _as_secret(problem) if problem.code == "unknown-key" and "key" in problem.key[len(key) :] else problem
        if hasattr(arguments, "judge"):
            yield from _check_judge(environments, f"{key}.judge", arguments.judge)
            yield from _check_workers(f"env.{name}.workers", environment, arguments.judge, environments.get(arguments.judge))


def _as_secret(problem: Problem) -> Problem:
    text = f"expected a secret in a variable of the environment, not in a recipe; this {problem.message}"
    return Problem(problem.key, "secret-in-recipe", text)


def _check_judge(environments: Environments, key: str, judge: str) -> Iterator[Problem]:
    fit = [name for name, one in environments.items() if one.kind not in KINDS or kind_class(one.kind).is_final]
    if judge not in fit:
        why = f"is of kind {environments[judge].kind}" if judge in environments else "is not there"
        text = (
            f"got '{judge}', but env.{judge} {why} and cannot judge a final answer; expected one of: {', '.join(fit) or 'none'}"
        )
        yield Problem(key, "not-a-choice", text)


def _check_workers(key: str, asking: EnvironmentConfig, name: str, judge: EnvironmentConfig | None) -> Iterator[Problem]:
    most = judge.workers if judge else None
    if asking.workers is not None and most is not None and asking.workers > most:
        yield Problem(key, "too-large", f"got {asking.workers}; expected at most env.{name}.workers {most}, its judge's")
