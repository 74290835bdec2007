"""Episodes with tools, from a record to the last observation, in the tokens of published templates."""

import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import DataConfig, DatasetConfig, EnvironmentConfig, TokenizerConfig, prompt_tools
from pipeline.data.chat import Encoder
from pipeline.data.observations import Observations
from pipeline.data.rendering import ChatTemplate
from pipeline.data.stream import encode_prompt
from pipeline.environments.build_environments import build
from pipeline.environments.environment import AnsweredTurn
from pipeline.environments.tool import Tool, ToolError, ToolSession, check_arguments, function_schema
from pipeline.rollout.judges.environment_steps import CallFailure, EnvironmentSettings, EnvStepper, StepOutcome, StepRequest
from pipeline.rollout.judges.pool import JudgePool
from pipeline.types import Prompt
from tests.data.tool_templates import MODELS, Model, parser_of, results, sampled, tokenizer_of
from tests.problems import refused


class Adder(Tool, ToolSession):
    """A user's tool, described by a schema of its arguments."""

    description = "Add two numbers."
    schema = {  # noqa: RUF012
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"type": "string"}},
        "required": ["a", "b"],
    }

    def open(self) -> "Adder":
        return self

    def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        return str(arguments["a"] + arguments["b"])


ENV = {
    "sums": EnvironmentConfig(
        kind="tools",
        timeout_s=30.0,
        precision="float32",
        kwargs={"judge": "answers", "tools": {"calculator": {}, "add": {"kind": f"{__name__}.Adder"}}},
    ),
    "answers": EnvironmentConfig(kind="exact_match", precision="float32"),
}
RECORD = {"input": "2+3?", "answer": "5"}
QUESTION = {"role": "user", "content": "2+3?"}


def encoder(model: Model) -> Encoder:
    columns = DatasetConfig(output_key="answer", env_name="sums")
    return Encoder(tokenizer_of(model), TokenizerConfig(), DataConfig(), columns, prompt_tools(ENV, "sums", own_code=True))


def calls(*pairs: tuple[int, int], first: int) -> dict[str, Any]:
    made = [
        {"id": f"call{first + i:05d}", "type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
        for i, (a, b) in enumerate(pairs)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def answered(said: dict[str, Any]) -> list[dict[str, Any]]:
    sums = [str(sum(call["function"]["arguments"].values())) for call in said["tool_calls"]]
    return [{**reply, "content": content} for reply, content in zip(results(said), sums, strict=True)]


def request(prompt: Prompt | None, tokens: list[int]) -> StepRequest:
    return StepRequest("0", "an answer", "sums", prompt, np.array(tokens, np.int32), False, 4000)


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3.5", "GLM-4.5", "Mistral Small 3.1"])
def test_an_episode_equals_the_rendering_of_its_conversation(name):
    model = MODELS[name]
    tokenizer, made = tokenizer_of(model), encoder(model)
    prompt = encode_prompt(made, 0, RECORD)
    environment = build(ENV, ["sums"], call_parser=parser_of(model))["sums"]
    stepper = EnvStepper(environment, tokenizer, Observations(tokenizer, TokenizerConfig(), chat=True))
    template, tools = ChatTemplate(tokenizer), prompt.task["template_options"]["tools"]
    assert [tool["function"]["name"] for tool in tools] == ["calculator", "add"]

    def text(messages: list[dict[str, Any]], **options: Any) -> str:
        return template.text(messages, tools=tools, **options)

    held, messages = prompt.tokens.tolist(), [QUESTION]
    for said in (calls((2, 3), first=0), calls((2, 4), (5, 6), first=1)):
        tokens = tokenizer(sampled(model, text, messages, said), add_special_tokens=False).input_ids
        outcome = stepper.step(request(None if len(messages) > 1 else prompt, tokens), lambda part: None)
        assert outcome.observation is not None and outcome.metrics["call_errors"] == 0
        held += tokens + outcome.observation.tolist()
        messages += [said, *answered(said)]
        assert tokenizer.decode(held) == text(messages, add_generation_prompt=True)
    last = stepper.step(request(None, tokenizer("5", add_special_tokens=False).input_ids), lambda part: None)
    assert last.over and last.reward == 1.0 and last.metrics["calls"] == 3


def test_a_call_after_thoughts_of_their_own_turn_counts():
    """Qwen3.5's prompt begins the reasoning. With a budget it ends before the answer, whose text has no mark of the end."""
    model = MODELS["Qwen3.5"]
    environment = build(ENV, ["sums"], call_parser=parser_of(model))["sums"]
    prompt = encode_prompt(encoder(model), 0, RECORD)
    text = (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    for thought, called in ((True, 1), (False, 0)):
        outcome = environment.step_answer(environment.reset(prompt), AnsweredTurn(text, thought=thought))
        assert outcome.metrics["calls"] == called


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"a": 1, "b": 2}, ""),
        ({"a": 1, "b": 2, "note": "x"}, ""),
        ({"a": 1}, "the arguments are: a, b, note; not: a"),
        ({"a": 1, "b": 2, "c": 3}, "the arguments are: a, b, note; not: a, b, c"),
        ({"a": 1, "b": True}, "argument b is a whole number"),
        ({"a": 1, "b": 2, "note": 3}, "argument note is a text"),
    ],
)
def test_arguments_fit_the_schema(arguments, wrong):
    schema = function_schema("add", Adder)
    with pytest.raises(ToolError, match=wrong) if wrong else contextlib.nullcontext():
        check_arguments(schema, arguments)
    schema["function"]["parameters"] = {**Adder.schema, "additionalProperties": True}
    assert "c" not in arguments or check_arguments(schema, arguments) is None


def test_a_records_tools_take_the_place_of_the_environments():
    made = encoder(MODELS["Qwen3"])
    mcp = {"name": "look", "description": "Look.", "inputSchema": {"type": "object", "properties": {}}}
    function = {"name": "look", "description": "Look.", "parameters": {"type": "object", "properties": {}}}
    own = made.template_options(RECORD | {"tools": [mcp]})
    assert own == {"tools": [{"type": "function", "function": function}]}
    assert made.template_options(RECORD | {"tools": "[]"}) == {}
    assert made.template_options(RECORD | {"tools": None}) == made.template_options(RECORD)
    assert [tool["function"]["name"] for tool in made.template_options(RECORD)["tools"]] == ["calculator", "add"]
    listed = Encoder(
        tokenizer_of(MODELS["Qwen3"]),
        TokenizerConfig(chat_template_kwargs={"tools": [mcp]}),
        DataConfig(),
        made.dataset,
        made.tools,
    )
    assert listed.template_options(RECORD) == {}  # the recipe's list is a variable of the template


def test_schemas_of_tools():
    calculator, adder = prompt_tools(ENV, "sums", own_code=True)
    assert [*calculator["function"]] == ["name", "description", "parameters"]
    assert calculator["function"]["parameters"]["properties"]["expression"]["type"] == "string"
    assert adder == {
        "type": "function",
        "function": {"name": "add", "description": "Add two numbers.", "parameters": Adder.schema},
    }
    assert prompt_tools(ENV, "sums") == [calculator]  # a plan runs no code of the user
    assert prompt_tools(ENV, "answers") == prompt_tools(ENV, None) == []


def test_a_template_that_drops_tools_is_refused_in_the_job():
    with refused(("policy.tokenizer.chat_template", "unsupported")):
        encoder(MODELS["Gemma 3"])


def test_judges_share_the_parser_of_their_parent(tmp_path: Path):
    """A judge, which is forked, reads calls within its step: it does not import vLLM, which takes seconds."""
    model = MODELS["Qwen3"]
    tokenizer_of(model).save_pretrained(tmp_path)
    settings = EnvironmentSettings(ENV, TokenizerConfig(name=str(tmp_path)), True, 3, sys.path)
    wakeup = threading.Event()
    judges = JudgePool(settings, wakeup)
    judges.wait_until_loaded()
    tokenizer, prompt = tokenizer_of(model), encode_prompt(encoder(model), 0, RECORD)
    broken = tokenizer('<tool_call>{"name": "add"<|im_end|>', add_special_tokens=False).input_ids
    judges.submit(request(prompt, broken))
    found: dict[str, StepOutcome | CallFailure] = {}
    while not found:
        wakeup.wait(judges.seconds_left())
        wakeup.clear()
        found |= judges.take()
    judges.close()
    outcome = found["0"]
    assert isinstance(outcome, StepOutcome) and outcome.observation is not None
    assert (outcome.metrics["calls"], outcome.metrics["call_errors"]) == (1, 1)
    told = str(tokenizer.decode(outcome.observation))
    assert told.startswith("\n<|im_start|>user\n<tool_response>\nerror: not JSON:")
