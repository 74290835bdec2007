"""Before submission: templates that drop tools, and parsers that vLLM does not have."""

import json

import pytest

from launch.preflight import input_files
from launch.preflight.tool_calls import TABLES, _names
from pipeline import config
from pipeline.data.call_parsers import FORMATS
from tests.data.tool_templates import FOLDER
from tests.launch.model import write_recipe
from tests.problems import named

TEMPLATE, TOOL_PARSER = "policy.tokenizer.chat_template", "policy.generation.tool_parser"
UNKNOWN = "{{ messages[0].content }}{{ tools | tojson }}"  # it shows tools, and says nothing about the form of calls
TOOLS = {"kind": "tools", "kwargs": {"judge": "answers", "tools": {"calculator": {}, "own": {"kind": "nowhere.Missing"}}}}


@pytest.fixture
def found(tmp_path):
    """Return a function (template, overrides) -> the problems of a recipe with tools, with their messages."""
    path = write_recipe(tmp_path)

    def problems(template: str, *overrides: str):
        env = json.dumps({"_override_": True, "sums": TOOLS, "answers": {"kind": "exact_match"}})
        chosen = FOLDER / f"{template}.jinja" if (FOLDER / f"{template}.jinja").exists() else template
        recipe = config.load(
            str(path),
            ["data.apply_chat_template=true", f"env={env}", "data.train.env_name=sums", "data.validation.env_name=sums",
             f"policy.tokenizer.chat_template='{chosen}'", "grpo.max_rollout_turns=3", *overrides],
        )  # fmt: skip
        return [problem for problem in input_files.problems(recipe) if problem.key in (TEMPLATE, *TABLES)]

    return problems


@pytest.mark.parametrize(
    ("template", "overrides", "expected"),
    [
        ("qwen3", [], set()),
        ("gemma3", [], {(TEMPLATE, "unsupported")}),
        ("gemma3", ["env.sums.kwargs.in_prompts=true"], set()),
        ("gemma3", ["policy.tokenizer.chat_template_kwargs={tools: []}"], set()),  # the recipe's own list
        ("gemma3", ["data.train.env_name=answers", "data.validation.env_name=answers"], set()),
        (UNKNOWN, [], {(TOOL_PARSER, "missing-value")}),
        (UNKNOWN, [f"{TOOL_PARSER}=hermes"], set()),
        ("qwen3", [f"{TOOL_PARSER}=hermess"], {(TOOL_PARSER, "not-a-choice")}),
        ("qwen3", ["policy.generation.reasoning_parser=qwen"], {("policy.generation.reasoning_parser", "not-a-choice")}),
    ],
)
def test_templates_and_parsers_are_checked(found, template, overrides, expected):
    problems = found(template, *overrides)
    assert named(problems) == expected
    for problem in problems:
        remedy = {TEMPLATE: "env.NAME.kwargs.in_prompts=true", TOOL_PARSER: "hermes"}.get(problem.key, "qwen3")
        assert "Try" in problem.message and remedy in problem.message


def test_the_formats_are_parsers_of_vllm():
    assert {*FORMATS.values()} <= {*_names(TOOL_PARSER)} and "qwen3" in _names("policy.generation.reasoning_parser")
