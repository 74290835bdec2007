"""Keys of environments, `env.<name>`, and the registry of built-in kinds of environments.

A new kind is one file in `pipeline/environments/` and one line in KINDS, or an entry point of an installed package in the group
`hetstep.environments`. Its class describes and checks its `kwargs`
(`pipeline/environments/environment.py`). Only modules of kinds that a recipe names are imported. The kwargs of your own kinds
are checked where they are imported: `pipeline/environments/custom.py`.

An environment has a `kind`, or several `rewards` of the policy's last answer, whose weighted sum is its reward. The parts of
either form are its scorers (`scorers`), so that a check of kinds and kwargs is the same for both.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from pipeline.config import schema_validation
from pipeline.config.policy import Precision, TokenizerConfig
from pipeline.recipe import user_code
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.recipe.values import HF_OVERRIDES, Bool, Check, Float, Line, Positive, Text, interpolation, not_a_kind
from pipeline.seams.entry_points import Registry

_OURS = {
    "agent": "pipeline.environments.agent.Agent",
    "answer_tags": "pipeline.environments.answer_tags.AnswerTags",
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
    "nemo_gym": "pipeline.environments.nemo_gym.NemoGym",
    "python_agent": "pipeline.environments.python_agent.PythonAgent",
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


OWN_CODE = "the dotted path of your own class or function, or FILE.py:NAME with a path relative to the recipe's folder"
Kind = Annotated[Text, Check(lambda kind: not_a_kind(kind, KINDS, files=True), "not-a-choice")]


@dataclass
class RewardConfig:
    """One of several rewards of an answer."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    fn: Annotated[Kind, Field(description=f"A kind of one turn; {OWN_CODE}.")]
    weight: Annotated[Float, Field(ge=-1e15, le=1e15)] = 1.0
    """Factor of this reward in the sum."""
    name: Annotated[Text | None, Check(lambda name: _reward_name_error(name))] = None
    """Name of its metrics. null: the last part of fn."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments of fn."""

    @property
    def label(self) -> str:
        """The name in metrics."""
        return self.name or re.split(r"[.:]", self.fn)[-1]


def _reward_name_error(name: str | None) -> str | None:
    fits = name is None or re.fullmatch(r"[A-Za-z0-9_.-]+", name)
    return None if fits else f"got {name!a}; expected letters, digits, and any of _ - ."


@dataclass
class EnvironmentConfig:
    """An environment scores answers, and may reply to the policy before the final answer.

    model_name and the keys after it are for kind reward_model.
    """

    kind: Annotated[
        Kind | None,
        Field(
            description=f"One of {', '.join(KINDS.built_in)}; one of an installed package; or {OWN_CODE}. null: see rewards."
        ),
    ] = None
    rewards: Annotated[
        list[RewardConfig],
        Field(
            description="Several rewards of an answer, in place of kind and kwargs: a list of {fn, weight, name, kwargs}. fn is"
            f" a kind of one turn, {OWN_CODE}; weight is 1 by default, and name the last part of fn. The reward is the weighted"
            " sum; each is logged as reward/NAME."
        ),
    ] = field(default_factory=list)
    timeout_s: Annotated[Float, Field(gt=0)] = 10.0
    """Time limit of one turn of an episode, in seconds."""
    workers: Positive | None = None
    """Turns that each engine scores concurrently, on each environment rank that serves it. null: the kind's default."""
    broken_reward: Annotated[Float, Field(ge=-1e15, le=1e15)] = 0.0
    """Reward of an answer that crashes its environment; of several rewards, their sum. Lower it if your own kind gives wrong
    answers less than 0."""
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


@dataclass(frozen=True)
class AnswerScorer:
    """Names a scorer of an environment's answers: the environment's kind, or one of its `rewards`."""

    key: str  # of its kind: env.NAME.kind, or env.NAME.rewards[0].fn
    kind: str
    kwargs: dict[str, Any]
    reward: RewardConfig | None = None  # None for the environment's kind

    @property
    def kwargs_key(self) -> str:
        """The key of `kwargs`."""
        return f"{self.key.rpartition('.')[0]}.kwargs"


def scorers(name: str, environment: EnvironmentConfig) -> list[AnswerScorer]:
    """Return what scores answers in the environment `env.<name>`: its kind, if it has one, then its rewards in their order."""
    kind = [] if environment.kind is None else [AnswerScorer(f"env.{name}.kind", environment.kind, environment.kwargs)]
    return [
        *kind,
        *(
            AnswerScorer(f"env.{name}.rewards[{number}].fn", reward.fn, reward.kwargs, reward)
            for number, reward in enumerate(environment.rewards)
        ),
    ]


@dataclass(frozen=True)
class AnswerCheck:
    """An environment's check of expected answers."""

    check: Callable[[str], None]  # raises ValueError for one that no text can be judged by
    at_start: int  # answers of a data set to check before the run; the others are checked where they are used


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


def read_kwargs(key: str, kind: str, kwargs: dict[str, Any]) -> tuple[Any, list[Problem]]:
    """Return (arguments with defaults, problems of the kwargs at `key`) of a built-in kind."""
    described = kind_class(kind)
    arguments, problems = schema_validation.validate_mapping(described.Arguments, key, kwargs)
    return arguments, problems or list(described.check(key, arguments))


def answer_check(environments: Environments, name: str | None) -> AnswerCheck | None:
    """Return the check of expected answers of an environment, or of the `judge` in its kwargs.

    Return None if there is no such check: for kinds of the user, and if the kwargs have problems.
    """
    checks = []
    for scorer in judging_scorers(environments, name):
        if scorer.kind in KINDS:
            arguments, problems = read_kwargs(scorer.kwargs_key, scorer.kind, scorer.kwargs)
            if not problems:
                kind = kind_class(scorer.kind)
                checks.append(AnswerCheck(functools.partial(kind.check_answer, arguments=arguments), kind.checked_at_start))
    if len(checks) < 2:
        return next(iter(checks), None)
    return AnswerCheck(functools.partial(_check_all, checks), min(check.at_start for check in checks))


def _check_all(checks: list[AnswerCheck], answer: str) -> None:
    for check in checks:
        check.check(answer)


def judging_scorers(environments: Environments, name: str | None) -> list[AnswerScorer]:
    """Return the scorers of environment `name`, or of the `judge` in its kwargs."""
    environment = environments.get(name) if name else None
    if environment is None or name is None:
        return []
    judge = str(environment.kwargs.get("judge"))
    return scorers(judge, environments[judge]) if judge in environments else scorers(name, environment)


def reads_columns(environments: Environments, name: str | None) -> bool:
    """Return whether what scores an environment's answers may read a record's columns: user code, an agent, or a judge."""
    return any(
        scorer.kind not in KINDS
        or hasattr(kind_class(scorer.kind), "play")
        or "columns" in scorer.kwargs
        or "reference" in scorer.kwargs
        for scorer in judging_scorers(environments, name)
    )


def judged_by_expected_answers(environments: Environments, name: str | None) -> bool:
    """Return whether a kind that needs expected answers scores an environment's answers."""
    return any(_needs_answers(scorer) for scorer in judging_scorers(environments, name) if scorer.kind in KINDS)


def _needs_answers(scorer: AnswerScorer) -> bool:
    arguments, problems = read_kwargs(scorer.kwargs_key, scorer.kind, scorer.kwargs)
    return bool(problems) or kind_class(scorer.kind).needs_answers(arguments)


def agents(environments: Environments) -> frozenset[str]:
    """Return the environments whose agents play their episodes."""
    kinds = {name: environment.kind for name, environment in environments.items() if environment.kind in KINDS}
    return frozenset(name for name, kind in kinds.items() if hasattr(kind_class(str(kind)), "play"))


def prompt_tools(environments: Environments, name: str | None, own_code: bool = False) -> list[dict[str, Any]]:
    """Return the tools that the prompts of an environment show, as JSON schemas in OpenAI's form.

    own_code: whether to run the user's code, as only the job may. Else the user's own tools are left out.
    """
    environment = environments.get(name) if name else None
    if environment is None or environment.kind not in KINDS:
        return []
    arguments, problems = read_kwargs(f"env.{name}.kwargs", str(environment.kind), environment.kwargs)
    return [] if problems else kind_class(str(environment.kind)).tool_schemas(arguments, own_code)


def reads_calls(environments: Environments) -> bool:
    """Return whether an environment reads the tool calls in the policy's turns."""
    return any(
        environment.kind in KINDS and kind_class(str(environment.kind)).reads_calls for environment in environments.values()
    )


def check_environments(environments: Environments) -> Iterator[Problem]:
    """Yield the problems of the environments' kwargs, alone and in combination with other environments."""
    for name, environment in environments.items():
        yield from _check_rewards(f"env.{name}", environment)
        for scorer in scorers(name, environment):
            if scorer.kind not in KINDS:
                continue
            key = scorer.kwargs_key
            arguments, problems = read_kwargs(scorer.kwargs_key, scorer.kind, scorer.kwargs)
            for problem in problems:
                is_secret = problem.code == "unknown-key" and "key" in problem.key[len(key) :]
                yield _as_secret(problem) if is_secret else problem
            if scorer.reward is None and getattr(arguments, "judge", None) is not None:
                judge = environments.get(arguments.judge)
                yield from _check_judge(environments, f"{key}.judge", arguments.judge)
                yield from _check_workers(f"env.{name}.workers", environment, arguments.judge, judge)


def _check_rewards(key: str, environment: EnvironmentConfig) -> Iterator[Problem]:
    """Yield the problems of an environment's kind and rewards, of which it has one."""
    kind, rewards = environment.kind, environment.rewards
    if kind is None and not rewards:
        yield Problem(f"{key}.kind", "missing-value", f"{schema_validation.NO_VALUE}. Try a kind, or {key}.rewards")
    if kind is not None and rewards:
        message = (
            f"got rewards with {key}.kind={kind}; expected one of the two. Try {key}={{_override_: true, rewards: [...]}}, or"
            f" the kind as an entry {{fn: {kind}}}"
        )
        yield Problem(f"{key}.rewards", "contradiction", message)
    if rewards and environment.kwargs and kind is None:
        message = f"got {', '.join(environment.kwargs)}; expected kwargs in the entries of {key}.rewards"
        yield Problem(f"{key}.kwargs", "has-no-effect", f"{message}. Try {{fn: {rewards[0].fn}, kwargs: {{...}}}}")
    labels = [reward.label for reward in rewards]
    for number, reward in enumerate(rewards):
        at = f"{key}.rewards[{number}]"
        if reward.fn in KINDS and not kind_class(reward.fn).is_final:
            one_turn = ", ".join(kind for kind in KINDS if kind_class(kind).is_final)
            yield Problem(f"{at}.fn", "not-a-choice", f"got {reward.fn}; expected a kind of one turn: {one_turn}")
        if reward.label in labels[:number]:
            message = f"got {reward.label} a second time; expected names that differ"
            yield Problem(f"{at}.name", "contradiction", f"{message}. Try name: {reward.label}_{number}")
        if reward.weight == 0 and all(other.weight == 0 for other in rewards):
            yield Problem(f"{at}.weight", "has-no-effect", "got 0, as for all rewards; expected a weight other than 0")


def _as_secret(problem: Problem) -> Problem:
    text = f"secrets belong in environment variables, not in a recipe; this {problem.message}"
    return Problem(problem.key, "secret-in-recipe", text)


def _check_judge(environments: Environments, key: str, judge: str) -> Iterator[Problem]:
    fit = [name for name, one in environments.items() if one.kind not in KINDS or kind_class(str(one.kind)).is_final]
    if judge not in fit:
        why = f"of kind {environments[judge].kind} cannot score a final answer" if judge in environments else "does not exist"
        text = f"got '{judge}', but env.{judge} {why}; expected one of: {', '.join(fit) or 'none'}"
        yield Problem(key, "not-a-choice", text)


def _check_workers(key: str, asking: EnvironmentConfig, name: str, judge: EnvironmentConfig | None) -> Iterator[Problem]:
    most = judge.workers if judge else None
    if asking.workers is not None and most is not None and asking.workers > most:
        yield Problem(key, "too-large", f"got {asking.workers}; expected at most env.{name}.workers of the judge, {most}")
