"""Kinds of environments: checks of their recipes at submission, and the environments built from them."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.config import KINDS, EnvironmentConfig, Problem, kind_class, load
from pipeline.config import inspect as inspect_recipe
from pipeline.environments.build_environments import build
from pipeline.environments.environment import BuiltinEnvironment, Environment, Outcome
from pipeline.environments.exact_match import ExactMatch
from pipeline.environments.math import Math
from pipeline.environments.tools import TOOLS
from pipeline.types import Prompt
from tests.environments.pooled import made
from tests.problems import named, refused

RECIPE = "tiny_grpo"
PROMPT = Prompt(0, np.zeros(1, np.int32), "x", {"answer": "4"})
CALCULATOR, TOOLED = "kind=calculator", "kind=tools kwargs.judge=addition"
JUDGE = "kind=llm_judge kwargs.model=m kwargs.url=http://j/v1"
PAIRWISE = f"{JUDGE} kwargs.rating=pairwise"


def found(described: str, *more: str) -> list[Problem]:
    """Return the problems of tiny_grpo with an environment x of that description."""
    overrides = [f"env.x.{override}" for override in re.split(r" (?=kwargs\.)", described)]
    return [problem for problem in inspect_recipe(RECIPE, [*overrides, *more]).problems if problem.key.startswith("env.")]


@pytest.mark.parametrize(
    ("described", "key", "code"),
    [
        ("kind=maths", "kind", "not-a-choice"),
        ("kind=maths.is fun", "kind", "not-a-choice"),
        ("kind=math kwargs.math_verify=hf", "kwargs.math_verify", "unknown-key"),
        ("kind=math kwargs.math_verify_impl=hf", "kwargs.math_verify_impl", "not-a-choice"),
        ("kind=reward_model kwargs.scale=2", "kwargs.scale", "unknown-key"),
        ("kind=exact_match kwargs.pattern='('", "kwargs.pattern", "bad-format"),
        ("kind=exact_match kwargs.pattern='(a)(b)'", "kwargs.pattern", "bad-format"),
        ("kind=multiple_choice kwargs.choices=30", "kwargs.choices", "too-large"),
        ("kind=multiple_choice kwargs.choices=1", "kwargs.choices", "too-small"),
        ("kind=multiple_choice kwargs.choices=four", "kwargs.choices", "wrong-type"),
        ("kind=sliding_puzzle kwargs.tells=all", "kwargs.tells", "not-a-choice"),
        ("kind=sliding_puzzle kwargs.observation=board", "kwargs.observation", "bad-format"),
        ("kind=sliding_puzzle kwargs.action_pattern=')'", "kwargs.action_pattern", "bad-format"),
        (CALCULATOR, "kwargs.judge", "missing-value"),
        (f"{CALCULATOR} kwargs.judge=y", "kwargs.judge", "not-a-choice"),
        (f"{CALCULATOR} kwargs.judge=x", "kwargs.judge", "not-a-choice"),
        (f"{CALCULATOR} kwargs.judge=addition kwargs.reply=is", "kwargs.reply", "bad-format"),
        (f"{CALCULATOR} kwargs.judge=addition kwargs.open=''", "kwargs.open", "too-small"),
        (f"{TOOLED} kwargs.tools=[]", "kwargs.tools", "wrong-type"),
        (f"{TOOLED} kwargs.tools=[calculatr]", "kwargs.tools.calculatr", "not-a-choice"),
        (f"{TOOLED} kwargs.tools={{calculator: {{args: {{}}}}}}", "kwargs.tools.calculator.args", "unknown-key"),
        (f"{TOOLED} kwargs.tools={{python: {{kwargs: {{wall: 3}}}}}}", "kwargs.tools.python.kwargs.wall", "unknown-key"),
        (
            f"{TOOLED} kwargs.tools={{python: {{kwargs: {{memory_bytes: -1}}}}}}",
            "kwargs.tools.python.kwargs.memory_bytes",
            "too-small",
        ),
        ("kind=code kwargs.reward=some", "kwargs.reward", "not-a-choice"),
        ("kind=code kwargs.sandbox=docker", "kwargs.sandbox", "not-a-choice"),
        ("kind=code kwargs.processes=0", "kwargs.processes", "too-small"),
        ("kind=code_interpreter kwargs.readable=[here]", "kwargs.readable", "bad-format"),
        ("kind=llm_judge kwargs.model=m", "kwargs.model", "has-no-effect"),
        ("kind=llm_judge kwargs.url=http://j/v1", "kwargs.model", "missing-value"),
        (f"{JUDGE} kwargs.overlong=shorten", "kwargs.overlong", "unsupported"),
        (f"{JUDGE} kwargs.rating=rubric", "kwargs.criteria", "missing-value"),
        (f"{JUDGE} kwargs.rating=rubric kwargs.criteria=[{{name: A}}, {{name: a}}]", "kwargs.criteria", "missing-value"),
        (f"{JUDGE} kwargs.rating=rubric kwargs.criteria=[{{name: '7'}}]", "kwargs.criteria[0].name", "bad-format"),
        (f"{JUDGE} kwargs.criteria=[{{name: A}}]", "kwargs.criteria", "has-no-effect"),
        (f"{JUDGE} kwargs.reference=column", "kwargs.reference", "has-no-effect"),
        (
            f"{JUDGE} kwargs.rating=pairwise kwargs.second_prompt='{{answer_a}}{{answer_b}}'",
            "kwargs.second_prompt",
            "has-no-effect",
        ),
        (f"{PAIRWISE} kwargs.prompt='{{answer_a}}'", "kwargs.prompt", "bad-format"),
        (f"{JUDGE} kwargs.columns=[source]", "kwargs.columns", "has-no-effect"),
        ("kind=llm_judge kwargs.request={temperature: -1}", "kwargs.request", "wrong-type"),
        ("kind=llm_judge kwargs.request={stream: true}", "kwargs.request", "wrong-type"),
        ("kind=llm_judge kwargs.model=m kwargs.url=https://u:p@j/v1", "kwargs.url", "secret-in-recipe"),
        ("kind=llm_judge kwargs.model=m kwargs.url=judge", "kwargs.url", "bad-format"),
        ("kind=llm_judge kwargs.model=m kwargs.url=http://j/v1/chat/completions", "kwargs.url", "bad-format"),
        (f"{JUDGE} kwargs.api_key=s3", "kwargs.api_key", "secret-in-recipe"),
        (f"{JUDGE} kwargs.api_key_env=sk-123", "kwargs.api_key_env", "bad-format"),
        (f"{JUDGE} kwargs.api_key_env=NO_SUCH_KEY", "kwargs.api_key_env", "missing-value"),
        (f"{JUDGE} kwargs.scale=[1]", "kwargs.scale", "bad-format"),
        (f"{JUDGE} kwargs.prompt=rate", "kwargs.prompt", "bad-format"),
        (f"{JUDGE} kwargs.second_prompt=rate", "kwargs.second_prompt", "bad-format"),
        (f"{JUDGE} kwargs.prompt='{{response}} {{anwser}} {{a}}'", "kwargs.prompt", "bad-format"),
        (f"{JUDGE} kwargs.score_pattern=')'", "kwargs.score_pattern", "bad-format"),
    ],
)
def test_errors_are_reported(described: str, key: str, code: str):
    more = ("env.x.model_name=some/where",) if "reward_model" in described else ()
    assert named(found(described, *more)) == {(f"env.x.{key}", code)}


@pytest.mark.parametrize(
    "described",
    [
        "kind=math kwargs.math_verify_impl=dapo_math_verify",
        f"{TOOLED} kwargs.tools=[calculator,python]",
        f"{TOOLED} kwargs.tools={{search: {{kind: my.tools.Search, kwargs: {{k: 3}}}}}}",
        f"{CALCULATOR} kwargs.judge=addition kwargs.open='[' kwargs.close=']'",
        "kind=sliding_puzzle kwargs.max_moves=30",
        "kind=llm_judge kwargs.model=m kwargs.url=https://j.example/v1 kwargs.request.temperature=0",
        "kind=my_package.environments.Mine kwargs.anything=3",
    ],
)
def test_valid_environments_have_no_problems(described: str):
    assert found(described, "env.x.workers=1") == []


def test_more_workers_than_the_judge_has_are_reported():
    judged = (f"{CALCULATOR} kwargs.judge=addition", "env.addition.workers=2")
    assert named(found(*judged, "env.x.workers=4")) == {("env.x.workers", "too-large")}
    assert found(*judged, "env.x.workers=2") == []


def test_a_key_that_is_not_text_is_not_repeated():
    problems = found("kind=llm_judge kwargs.api_key=s3cret kwargs.api_key_env=s3cret!")
    assert problems and "s3cret" not in "".join(map(str, problems))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_describes_its_kwargs(kind: str):
    of = kind_class(kind)
    assert issubclass(of, BuiltinEnvironment) and all(field.type for field in of.Arguments.__dataclass_fields__.values())


# ---- adding a kind -----------------------------------------------------------------------------------------------------------

TOY = '''
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from pipeline.recipe.problems import Problem
from pipeline.recipe.values import MISSING, Positive, Text
from pipeline.environments.environment import BuiltinEnvironment, Outcome, EnvironmentContext
from pipeline.types import Prompt


@dataclass
class ToyArguments:
    word: Annotated[Text, Field(description="What the policy is to say.")] = MISSING
    most: Annotated[Positive, Field(le=9, description="Times that count.")] = 3


class Toy(BuiltinEnvironment):
    """Reward: how often the policy says a word."""

    Arguments = ToyArguments

    @classmethod
    def check(cls, key: str, arguments: ToyArguments) -> Iterator[Problem]:
        if " " in arguments.word:
            yield Problem(f"{key}.word", "bad-format", "expected one word")

    def __init__(self, arguments: ToyArguments, context: EnvironmentContext) -> None:
        self._arguments = arguments

    def step(self, prompt: Prompt, text: str) -> Outcome:
        return Outcome(float(min(self._arguments.most, text.split().count(self._arguments.word))))
'''


def test_a_new_environment_is_one_file_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "toy_environment.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(KINDS.built_in, "toy", "toy_environment.Toy")
    recipe = load(RECIPE, ["env.x.kind=toy", "env.x.kwargs.word=aye"])
    environment = build(recipe.env)["x"]
    assert [environment.step(PROMPT, text).reward for text in ("no", "aye or aye", "aye " * 9)] == [0.0, 2.0, 3.0]
    for kwargs, key, code in (
        ("{}", "word", "missing-value"),
        ("{word: a, mst: 2}", "mst", "unknown-key"),
        ("{word: a, most: 10}", "most", "too-large"),
        ("{word: a b}", "word", "bad-format"),
    ):
        assert named(found("kind=toy", f"env.x.kwargs={kwargs}")) == {(f"env.x.kwargs.{key}", code)}


# ---- building ----------------------------------------------------------------------------------------------------------------


class LengthReward(Environment):
    """A user's environment."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def step(self, prompt: Prompt, text: str) -> Outcome:
        return Outcome(self.scale * len(text))


class NoStep(Environment):
    def reset(self, prompt: Prompt) -> Prompt:
        return prompt


class Nothing:
    """A class that is not an environment."""


class Alien:
    """An environment that has none of our base classes."""

    def reset(self, prompt: Prompt) -> Prompt:
        return prompt

    def step(self, prompt: Prompt, text: str) -> Outcome:
        return Outcome(1.0)

    def close(self) -> None: ...


@pytest.fixture
def environments() -> Iterator[dict[str, Environment]]:
    configs = {
        "own": EnvironmentConfig(kind="exact_match", kwargs={"pattern": "=(.*)"}),
        "said": EnvironmentConfig(kind="exact_match", workers=3),
        "alien": EnvironmentConfig(kind=f"{__name__}.Alien"),
        "length": EnvironmentConfig(kind=f"{__name__}.LengthReward", kwargs={"scale": 0.5}),
        "math": EnvironmentConfig(kind="math", timeout_s=5.0, workers=2),
    }
    built = build(configs)
    yield built
    for environment in built.values():
        environment.close()


def test_the_kinds_and_a_users_class(environments):
    workers = {name: environment.workers for name, environment in environments.items()}
    assert workers == {"own": 1, "said": 3, "alien": 1, "length": 1, "math": 2}
    assert isinstance(environments["own"], ExactMatch) and isinstance(environments["math"], Math)
    assert environments["own"].step(PROMPT, "2+2=4").reward == environments["math"].step(PROMPT, "$4$").reward == 1.0
    assert environments["length"].step(PROMPT, "abc").reward == 1.5


@pytest.mark.parametrize(
    ("kind", "kwargs", "expected"),
    [
        ("maths", {}, ("env.x.kind", "not-a-choice")),
        ("no.such.Class", {}, ("env.x.kind", "not-importable")),
        ("pipeline.environments.math.Algebra", {}, ("env.x.kind", "not-importable")),
        ("exact_match", {"patern": "x"}, ("env.x.kwargs.patern", "unknown-key")),
        ("exact_match", {"pattern": "("}, ("env.x.kwargs.pattern", "bad-format")),
        (f"{__name__}.NoStep", {}, ("env.x", "wrong-type")),
        (f"{__name__}.Nothing", {}, ("env.x", "wrong-type")),
        ("tools", {"judge": "b", "tools": ["calculator"]}, ("env.x.kwargs.judge", "not-a-choice")),
    ],
)
def test_invalid_environments_are_refused(kind: str, kwargs: dict, expected: tuple[str, str]):
    with refused(expected):
        made(kind, **kwargs)


def test_tools_have_parameters():
    assert all(kind.parameters for kind in TOOLS.values())


def test_a_reward_model_scores_elsewhere():
    outcome = made("reward_model").step(Prompt(0, np.zeros(1, np.int32), "judge", {}), "whatever")
    assert (outcome.reward, outcome.metrics) == (0.0, {})
