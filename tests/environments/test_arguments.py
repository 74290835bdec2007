"""What a recipe says of its environments, held against what there is, at submission."""

import pytest

from pipeline.config import ENVIRONMENT_KINDS
from pipeline.config import inspect as inspect_recipe
from pipeline.config.environments import ARGUMENTS, TOOL_ARGUMENTS, TOOLS
from pipeline.environments import registry

RECIPE = "tiny_grpo"


def told(*overrides: str) -> list[str]:
    return [problem for problem in inspect_recipe(RECIPE, overrides).problems if problem.startswith("env.")]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["kind=maths"],
            "env.x.kind: 'maths' is neither a kind nor the dotted path of a class or a function; did you mean math?",
        ),
        (["kind=maths.is fun"], "env.x.kind: 'maths.is fun' is neither"),
        (["kind=math", "timeout_s=0"], "env.x.timeout_s: 0 must be above 0"),
        (["kind=math", "workers=0"], "env.x.workers: 0 is too small; at least 1, or null"),
        (["kind=math", "kwargs.math_verify=hf"], "env.x.kwargs.math_verify: is not a key; did you mean math_verify_impl?"),
        (
            ["kind=math", "kwargs.math_verify_impl=hf"],
            "env.x.kwargs.math_verify_impl: 'hf' is not one of: hf_math_verify, dapo",
        ),
        (["kind=exact_match", "kwargs.pattern='('"], "env.x.kwargs.pattern: '(' is no regular expression"),
        (["kind=exact_match", "kwargs.pattern='(a)(b)'"], "env.x.kwargs.pattern: '(a)(b)' has 2 groups"),
        (["kind=multiple_choice", "kwargs.choices=30"], "env.x.kwargs.choices: 30 is out of range; from 2 to 26"),
        (["kind=multiple_choice", "kwargs.choices=four"], "env.x.kwargs.choices: 'four', but it must be a whole number"),
        (["kind=sliding_puzzle", "kwargs.tells=all"], "env.x.kwargs.tells: 'all' is not one of: words, board"),
        (["kind=sliding_puzzle", "kwargs.observation=board"], "env.x.kwargs.observation: has no {}"),
        (["kind=calculator"], "env.x.kwargs.judge: must be given"),
        (
            ["kind=calculator", "kwargs.judge=y"],
            "env.x.kwargs.judge: 'y' cannot judge the final answer (there is no env.y); one of: add",
        ),
        (
            ["kind=calculator", "kwargs.judge=x"],
            "env.x.kwargs.judge: 'x' cannot judge the final answer (env.x is of kind calculator)",
        ),
        (
            ["kind=tools", "kwargs.judge=addition", "kwargs.tools=[]"],
            "env.x.kwargs.tools: a list of names (calculator, python)",
        ),
        (
            ["kind=tools", "kwargs.judge=addition", "kwargs.tools=[calculatr]"],
            "env.x.kwargs.tools.calculatr: 'calculatr' is neither",
        ),
        (
            ["kind=tools", "kwargs.judge=addition", "kwargs.tools={calculator: {args: {}}}"],
            "env.x.kwargs.tools: calculator.args: is not",
        ),
        (["kind=code", "kwargs.reward=some"], "env.x.kwargs.reward: 'some' is not one of: all, share"),
        (["kind=code", "kwargs.sandbox=docker"], "env.x.kwargs.sandbox: 'docker' is not one of: auto, bubblewrap, namespaces"),
        (["kind=code", "kwargs.processes=0"], "env.x.kwargs.processes: 0 must be above 0"),
        (["kind=code_interpreter", "kwargs.readable=[here]"], "env.x.kwargs.readable: 'here' is not an absolute path"),
        (
            ["kind=tools", "kwargs.judge=addition", "kwargs.tools={python: {kwargs: {wall: 3}}}"],
            "env.x.kwargs.tools.python.kwargs.wall: is not a key; did you mean wall_s?",
        ),
        (
            ["kind=tools", "kwargs.judge=addition", "kwargs.tools={python: {kwargs: {memory_bytes: -1}}}"],
            "env.x.kwargs.tools.python.kwargs.memory_bytes: -1 must be above 0",
        ),
        (["kind=llm_judge", "kwargs.model=m"], "env.x.kwargs.url: must be given"),
        (
            ["kind=llm_judge", "kwargs.model=m", "kwargs.url=https://u:p@j/v1"],
            "env.x.kwargs.url: has a user or a password in it",
        ),
        (["kind=llm_judge", "kwargs.model=m", "kwargs.url=judge"], "env.x.kwargs.url: 'judge' is no http(s) address"),
        (
            ["kind=llm_judge", "kwargs.model=m", "kwargs.url=http://j/v1/chat/completions"],
            "env.x.kwargs.url: 'http://j/v1/chat/completions' says the route too; only http://j/v1",
        ),
        (
            ["kind=llm_judge", "kwargs.model=m", "kwargs.url=http://j/v1", "kwargs.api_key=s3"],
            "env.x.kwargs: a key does not belong",
        ),
        (
            ["kind=llm_judge", "kwargs.model=m", "kwargs.url=http://j/v1", "kwargs.api_key_env=sk-123"],
            "env.x.kwargs.api_key_env: no name of an environment variable",
        ),
        (
            ["kind=llm_judge", "kwargs.model=m", "kwargs.url=http://j/v1", "kwargs.api_key_env=NO_SUCH_KEY"],
            "env.x.kwargs.api_key_env: the environment variable NO_SUCH_KEY is not set",
        ),
        (
            ["kind=llm_judge", "kwargs.model=m", "kwargs.url=http://j/v1", "kwargs.scale=[1]"],
            "env.x.kwargs.scale: [1.0] is not two scores",
        ),
        (
            ["kind=llm_judge", "kwargs.model=m", "kwargs.url=http://j/v1", "kwargs.prompt=rate"],
            "env.x.kwargs.prompt: has no {response}",
        ),
    ],
)
def test_what_is_wrong_is_told(overrides: list[str], problem: str):
    found = told(*(f"env.x.{override}" for override in overrides))
    assert len([one for one in found if one.startswith(problem)]) == 1, found


@pytest.mark.parametrize(
    "overrides",
    [
        ["kind=math", "kwargs.math_verify_impl=dapo_math_verify", "workers=4"],
        ["kind=tools", "kwargs.judge=addition", "kwargs.tools=[calculator,python]"],
        ["kind=tools", "kwargs.judge=addition", "kwargs.tools={search: {kind: my.tools.Search, kwargs: {k: 3}}}"],
        ["kind=calculator", "kwargs.judge=addition", "kwargs.open='['", "kwargs.close=']'"],
        ["kind=sliding_puzzle", "kwargs.max_moves=30"],
        ["kind=llm_judge", "kwargs.model=m", "kwargs.url=https://j.example/v1", "kwargs.request.temperature=0"],
        ["kind=my_package.environments.Mine", "kwargs.anything=3"],
    ],
)
def test_what_is_right_is_not(overrides: list[str]):
    assert told(*(f"env.x.{override}" for override in overrides)) == []


def test_more_workers_than_the_judge_has_are_told():
    overrides = ["env.x.kind=calculator", "env.x.kwargs.judge=addition", "env.addition.workers=2"]
    assert told(*overrides, "env.x.workers=4") == ["env.x.workers: 4 are more than its judge has (env.addition.workers: 2)"]
    assert told(*overrides, "env.x.workers=2") == []


def test_a_key_that_is_no_text_is_not_repeated():
    assert "s3cret" not in "".join(
        told("env.x.kind=llm_judge", "env.x.kwargs.api_key=s3cret", "env.x.kwargs.api_key_env=s3cret!")
    )


def test_checks_are_of_keys_that_there_are():
    assert set(ARGUMENTS) == set(ENVIRONMENT_KINDS) == set(registry.KINDS)
    assert set(TOOL_ARGUMENTS) == set(TOOLS) == set(registry.TOOLS)
