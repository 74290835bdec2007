import numpy as np
import pytest

from pipeline.config import EnvironmentConfig
from pipeline.environments.base import Environment, Outcome
from pipeline.environments.exact_match import ExactMatch
from pipeline.environments.math import Math
from pipeline.environments.registry import build
from pipeline.types import Prompt


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
    """No environment at all."""


class Alien:
    """An environment that derives from nothing of ours."""

    def reset(self, prompt: Prompt) -> Prompt:
        return prompt

    def step(self, prompt: Prompt, text: str) -> Outcome:
        return Outcome(1.0)

    def close(self) -> None: ...


def test_how_many_at_once():
    configs = {
        "own": EnvironmentConfig(kind="exact_match"),
        "said": EnvironmentConfig(kind="exact_match", workers=3),
        "alien": EnvironmentConfig(kind=f"{__name__}.Alien"),
        "math": EnvironmentConfig(kind="math", workers=2),
    }
    environments = build(configs)
    assert {name: environment.workers for name, environment in environments.items()} == {
        "own": 1,
        "said": 3,
        "alien": 1,
        "math": 2,
    }
    assert len(environments["math"]._processes) == 2
    environments["math"].close()


def test_the_kinds_and_a_users_class():
    environments = build(
        {
            "addition": EnvironmentConfig(kind="exact_match", kwargs={"pattern": "=(.*)"}),
            "math": EnvironmentConfig(kind="math", timeout_s=3.0),
            "length": EnvironmentConfig(kind=f"{__name__}.LengthReward", kwargs={"scale": 0.5}),
        }
    )
    prompt = Prompt(0, np.zeros(1, np.int32), "length", {"answer": "4"})
    assert isinstance(environments["addition"], ExactMatch) and isinstance(environments["math"], Math)
    assert environments["addition"].step(prompt, "2+2=4").reward == environments["math"].step(prompt, "$4$").reward == 1.0
    assert environments["length"].step(prompt, "abc").reward == 1.5
    for environment in environments.values():
        environment.close()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            EnvironmentConfig(kind="maths"),
            r"env\.a \(kind maths\): no such kind; there are: calculator, code, code_interpreter",
        ),
        (EnvironmentConfig(kind="no.such.Class"), "there is no module no; looked in "),
        (
            EnvironmentConfig(kind="pipeline.environments.math.Algebra"),
            r"pipeline.environments.math \(.*math.py\) has no Algebra",
        ),
        (EnvironmentConfig(kind="exact_match", kwargs={"patern": "x"}), r"env\.a .*patern"),
        (
            EnvironmentConfig(kind="math", kwargs={"math_verify_impl": "dapo"}),
            "'dapo' is not one of: hf_math_verify, dapo_math_v",
        ),
        (EnvironmentConfig(kind=f"{__name__}.NoStep"), r"NoStep\): the class is abstract: it must write step"),
        (EnvironmentConfig(kind=f"{__name__}.Nothing"), "the class has no reset and no step and no close; an environment has"),
        (
            EnvironmentConfig(kind="tools", kwargs={"judge": "b", "tools": ["calculator"]}),
            "judge: there is no env.b; one of: a",
        ),
        (EnvironmentConfig(kind="multiple_choice", kwargs={"choices": 1}), "kwargs.choices: 1 is out of range; from 2 to 26"),
        (EnvironmentConfig(kind="math", timeout_s=0.0), r"\(kind math\): timeout_s: 0 must be above 0"),
        (EnvironmentConfig(kind="math", workers=0), "workers: 0 is too small; at least 1"),
    ],
)
def test_what_is_wrong_is_named(config: EnvironmentConfig, message: str):
    with pytest.raises(ValueError, match=message):
        build({"a": config})


def test_a_reward_model_judges_elsewhere():
    (environment,) = build({"judge": EnvironmentConfig(kind="reward_model", model_name="some/where")}).values()
    outcome = environment.step(Prompt(0, np.zeros(1, np.int32), "judge", {}), "whatever")
    assert (outcome.reward, outcome.metrics) == (0.0, {})
    environment.close()
    with pytest.raises(ValueError, match=r"env\.judge \(kind reward_model\): kwargs.scale: is not a key; there are none"):
        build({"judge": EnvironmentConfig(kind="reward_model", kwargs={"scale": 2.0})})
