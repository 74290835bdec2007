"""Keys of environments, `env.<name>`, and the registry of built-in kinds of environments.

A new kind is one file in `pipeline/environments/` and one line in KINDS, or an entry point of an installed package in the group
`hetstep.environments`. Its class describes and checks its `kwargs`
(`pipeline/environments/environment.py`). Only modules of kinds that a recipe names are imported. The kwargs of your own kinds
are checked where they are imported: `pipeline/environments/custom.py`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.config import schema_validation
from pipeline.config.policy import Precision, TokenizerConfig
from pipeline.recipe import user_code
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.recipe.values import HF_OVERRIDES, MISSING, Bool, Check, Float, Line, Positive, Text, interpolation, not_a_kind
from pipeline.seams.entry_points import Registry

_OURS = {
    "calculator": "pipeline.environments.tools.CalculatorEnvironment",
    "code": "pipeline.environments.code.Code",
    "code_benchmark": "pipeline.environments.code_benchmark.CodeBenchmark",
    "code_interpreter": "pipeline.environments.code.CodeInterpreter",
    "exact_match": "pipeline.environments.exact_match.ExactMatch",
    "gsm8k": "pipeline.environments.gsm8k.GSM8KAnswer",
    "ifeval": "pipeline.environments.ifeval.IFEval",
    "llm_judge": "pipeline.environments.llm_judge.LLMJudge",
    "math": "pipeline.environments.math.Math",
    "minerva_math": "pipeline.environments.minerva_math.MinervaMath",
    "multiple_choice": "pipeline.environments.multiple_choice.MultipleChoice",
    "reward_model": "pipeline.environments.reward_model.RewardModelEnvironment",
    "sliding_puzzle": "pipeline.environments.sliding_puzzle.SlidingPuzzle",
    "tools": "pipeline.environments.tools.Tools",
    "verifiers": "pipeline.environments.verifiers.Verifiers",
}
KINDS = Registry("hetstep.environments", _OURS, str)
"""Kind -> dotted path of its class."""


@dataclass
class RewardTokenizerConfig(TokenizerConfig):
    """The reward model's tokenizer and its chat template."""

    name: Line | None = None
    """Tokenizer. null: the one in the reward model's folder."""


@dataclass
class EnvironmentConfig:
    """An environment scores answers, and may reply to the policy before the final answer.

    model_name and the keys after it are for kind reward_model.
    """

    kind: Annotated[
        Text,
        Check(lambda kind: not_a_kind(kind, KINDS), "not-a-choice"),
        Field(
            description=f"One of {', '.join(KINDS.built_in)}; one of an installed package; or the dotted path of your own class"
            " or function."
        ),
    ] = MISSING
    timeout_s: Annotated[Float, Field(gt=0)] = 10.0
    """Time limit of one turn of an episode, in seconds."""
    workers: Positive | None = None
    """Turns that each engine scores concurrently. null: the kind's default."""
    broken_reward: Annotated[Float, Field(ge=-1e15, le=1e15)] = 0.0
    """Reward of an answer that crashes its environment. Lower it if your own kind gives wrong answers less than 0."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of the kind."""
    model_name: Line | None = None
    """Reward model: the hf/ folder that a run of algorithm rm saved, or any sequence classifier with one label."""
    tokenizer: RewardTokenizerConfig = field(default_factory=RewardTokenizerConfig)
    hf_config_overrides: Annotated[dict[str, Any], Field(description=HF_OVERRIDES)] = field(default_factory=dict)
    precision: Precision = interpolation("${policy.precision}")
    """Precision of the reward model; see policy.precision."""
    served_by: Literal["train", "reward"] = "train"
    """Ranks that compute the reward model. train: the train ranks, with the policy's parallel layout. reward: separate ranks,
    those of cluster.reward."""
    cpu_offload: Bool = True
    """served_by=train: keep the weights in host memory while the model is idle."""


Environments = Mapping[str, EnvironmentConfig]
"""Environments by their key under `env`."""


@functools.cache
def kind_class(kind: str) -> Any:
    """Return the class of a kind in KINDS, a `pipeline.environments.environment.BuiltinEnvironment`.

    Raises RecipeError if an installed package's class cannot be imported or is of another kind.
    """
    if kind in KINDS.built_in:
        return user_code.load(KINDS[kind])
    try:
        loaded = user_code.load(path := KINDS[kind])
    except Exception as error:
        message = f"{KINDS[kind]} cannot be imported: {type(error).__name__}: {error}"
        raise RecipeError(Problem(f"env.NAME.kind={kind}", "not-importable", message)) from error
    if not (isinstance(loaded, type) and hasattr(loaded, "Arguments") and hasattr(loaded, "build")):
        base = "pipeline.environments.environment.BuiltinEnvironment"
        raise RecipeError(Problem(f"env.NAME.kind={kind}", "wrong-type", f"{path}: expected a class that derives from {base}"))
    return loaded


def read_kwargs(key: str, environment: EnvironmentConfig) -> tuple[Any, list[Problem]]:
    """Return (arguments with defaults, problems of the kwargs at `key`) of an environment of a built-in kind."""
    kind = kind_class(environment.kind)
    arguments, problems = schema_validation.validate_mapping(kind.Arguments, key, environment.kwargs)
    return arguments, problems or list(kind.check(key, arguments))


@dataclass(frozen=True)
class AnswerCheck:
    """An environment's check of expected answers."""

    check: Callable[[str], None]  # raises ValueError for one that no text can be judged by
    at_start: int  # answers of a data set to check before the run; the others are checked where they are used


def answer_check(environments: Environments, name: str | None) -> AnswerCheck | None:
    """Return the check of expected answers of an environment, or of the `judge` in its kwargs.

    Return None if there is no such check: for kinds of the user, and if the kwargs have problems.
    """
    judge = _judge(environments, name)
    if judge is None or judge.kind not in KINDS:
        return None
    arguments, problems = read_kwargs("kwargs", judge)
    kind = kind_class(judge.kind)
    return None if problems else AnswerCheck(functools.partial(kind.check_answer, arguments=arguments), kind.checked_at_start)


def judged_by_own_code(environments: Environments, name: str | None) -> bool:
    """Return whether user code scores an environment's answers: the environment itself, or the `judge` in its kwargs."""
    judge = _judge(environments, name)
    return judge is not None and judge.kind not in KINDS


def _judge(environments: Environments, name: str | None) -> EnvironmentConfig | None:
    """Return the environment that scores the answers of environment `name`: the `judge` in its kwargs, or itself."""
    environment = environments.get(name) if name else None
    return environment and environments.get(environment.kwargs.get("judge", ""), environment)


def check_environments(environments: Environments) -> Iterator[Problem]:
    """Yield the problems of the environments' kwargs, alone and in combination with other environments."""
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
    text = f"secrets belong in environment variables, not in a recipe; this {problem.message}"
    return Problem(problem.key, "secret-in-recipe", text)


def _check_judge(environments: Environments, key: str, judge: str) -> Iterator[Problem]:
    fit = [name for name, one in environments.items() if one.kind not in KINDS or kind_class(one.kind).is_final]
    if judge not in fit:
        why = f"of kind {environments[judge].kind} cannot score a final answer" if judge in environments else "does not exist"
        text = f"got '{judge}', but env.{judge} {why}; expected one of: {', '.join(fit) or 'none'}"
        yield Problem(key, "not-a-choice", text)


def _check_workers(key: str, asking: EnvironmentConfig, name: str, judge: EnvironmentConfig | None) -> Iterator[Problem]:
    most = judge.workers if judge else None
    if asking.workers is not None and most is not None and asking.workers > most:
        yield Problem(key, "too-large", f"got {asking.workers}; expected at most env.{name}.workers of the judge, {most}")
