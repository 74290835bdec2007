"""Tool calls and their results in the templates that models were published with."""

import functools
import re
from typing import Any

import pytest

from pipeline.config import DataConfig, DatasetConfig, TokenizerConfig
from pipeline.data.call_parsers import CallParser
from pipeline.data.chat import Encoder
from pipeline.data.observations import CUT, Observations
from pipeline.data.records import Turns
from pipeline.data.rendering import ChatTemplate
from pipeline.data.tool_messages import ParsedTurn, ToolCall
from tests.data.published_templates import learned_text
from tests.data.tool_templates import (
    COLUMNS,
    MODELS,
    QUESTIONS,
    TOOL,
    parse,
    refusal,
    results,
    row,
    said_in,
    sampled,
    token_difference,
    tokenizer_of,
    turn,
)
from tests.problems import refused

WITH_CALLS = [name for name, model in MODELS.items() if model.calls]
WITH_SEVERAL = [name for name in WITH_CALLS if not MODELS[name].parallel]
DROPPED = {"Gemma 3", "DeepSeek-V3.1", "SmolLM2"}


@pytest.mark.parametrize("name", WITH_CALLS)
def test_what_the_template_writes_is_encoded_read_and_learned(name):
    """`row` compares tokens of episodes, calls and masks; the columns are in `tool_templates`."""
    cells = row(MODELS[name])
    expected = dict.fromkeys(COLUMNS, "") | {"parallel": MODELS[name].parallel}
    assert cells | {"shown": ""} == expected
    assert bool(cells["shown"]) == (name in DROPPED)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_preferences_learn_calls_and_answers_without_results(name):
    """The answers differ in their first calls. What is learned is what the policy would sample."""
    model = MODELS[name]
    made = Encoder(tokenizer_of(model), TokenizerConfig(), DataConfig(), DatasetConfig())
    text = functools.partial(ChatTemplate(tokenizer_of(model)).text, tools=[TOOL])
    said = [turn(number) for number in (1, 2)]
    chosen, rejected = ([*QUESTIONS, one, *results(one), {"role": "assistant", "content": "It is 5."}] for one in said)
    pair = made.pair({"chosen": chosen, "rejected": rejected, "tools": [TOOL]})
    for example, messages, one in zip(pair, (chosen, rejected), said, strict=True):
        assert isinstance(example, Turns) and example.first == 1
        calls, answer = learned_text(made.tokenizer, *made.encode(example))
        before = [*QUESTIONS, one]
        last = text(messages).removeprefix(text(messages[:-1], add_generation_prompt=True)).rstrip()
        assert (calls, answer) == (sampled(model, text, before[:-1], one), last)


@pytest.mark.parametrize("name", sorted(DROPPED & {*MODELS}))
def test_a_template_that_drops_tools_is_refused(name):
    assert re.fullmatch("policy.tokenizer.chat_template: does not show the tool add .*in_prompts=true.*", refusal(MODELS[name]))


def test_a_template_that_refuses_several_calls_renders_all_results():
    assert token_difference(MODELS["Llama 3.1"], 2) == ""


@pytest.mark.parametrize("name", [name for name in WITH_CALLS if name not in ("Llama 3.1", "gpt-oss", "DeepSeek-V3.1")])
def test_calls_in_the_reasoning_do_not_count(name):
    model = MODELS[name]
    text = said_in(model, turn(3)).removesuffix(model.end)
    call = text.rpartition("</think>")[2]
    begin = "" if name == "Qwen3.5" else "<think>"  # whose prompt has it
    read = parse(model, f"{begin}maybe {call}</think>No.{model.end}")
    assert (read.calls, read.malformed, read.content) == ((), "", "No.")
    assert parse(model, f"{begin}maybe {call}") == ParsedTurn("", f"maybe {call}".strip())  # the end is not reached
    assert len(parse(model, f"{begin}maybe {call}</think>{call}{model.end}").calls) == 1


@pytest.mark.parametrize("name", WITH_SEVERAL)
def test_a_second_call_that_is_cut_is_told_and_the_first_one_runs(name):
    model = MODELS[name]
    text = said_in(model, turn(3, 2)).removesuffix(model.end)
    read = parse(model, text[: -len(text) // 6])
    assert read.malformed and len(read.calls) < 2 and all(call.arguments["b"] == 0 for call in read.calls)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_of_unknown_tools_are_read(name):
    model = MODELS[name]
    read = parse(model, said_in(model, turn(3)).replace("add", "subtract"))
    assert [call.name for call in read.calls] == ["subtract"] and not read.malformed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant<|channel|>commentary to=functions.add"
            ' <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>',
            ParsedTurn("", "Add.", (ToolCall("add", {"a": 1, "b": 2}, "", "call00001"),)),
        ),
        (
            "<|channel|>analysis<|message|>to=functions.add?<|end|><|start|>assistant<|channel|>final<|message|>5<|return|>",
            ParsedTurn("5", "to=functions.add?"),
        ),
        ("<|channel|>commentary to=functions.add<|message|>{", ParsedTurn("", "", (), "a call without <|call|>")),
        ("<|channel|>commentary to=functions.add", ParsedTurn("", "", (), "a call without <|message|>")),
        ("5", ParsedTurn("5")),
        ("to=functions.add" * 20_000, ParsedTurn("", "", (), "a call without <|message|>")),  # in linear time
    ],
)
def test_gpt_oss_calls_tools_in_channels(text, expected):
    read = parse(MODELS["gpt-oss"], text)
    assert read == expected


def test_a_parser_that_does_not_read_the_templates_calls_is_refused():
    with refused(("policy.generation.tool_parser", "contradiction")):
        CallParser(tokenizer_of(MODELS["Qwen3"]), TokenizerConfig(), chat=True, tool_parser="mistral")
    with refused(("policy.generation.tool_parser", "not-a-choice")):
        CallParser(tokenizer_of(MODELS["Qwen3"]), TokenizerConfig(), chat=True, tool_parser="hermess")
    named = CallParser(tokenizer_of(MODELS["Qwen3"]), TokenizerConfig(), True, "hermes", "deepseek_r1")
    assert named.parse("<think>a</think>b") == ParsedTurn("b", "a")


@pytest.mark.parametrize("name", MODELS)
def test_an_unended_turn_gets_the_templates_end_before_the_results(name):
    model, said = MODELS[name], turn(0)
    tokenizer = tokenizer_of(model)
    told = Observations(tokenizer, TokenizerConfig(), chat=True)
    end: Any = tokenizer.convert_tokens_to_ids(model.end)  # typed as for a batch
    ended, unended = (told.tokens(results(said), after, said, [TOOL]).tolist() for after in (end, None))
    assert unended == [end, *ended]


@pytest.mark.parametrize("name", MODELS)
def test_neither_results_nor_names_write_special_tokens(name):
    model, said = MODELS[name], turn(0, 2)
    tokenizer = tokenizer_of(model)
    told = Observations(tokenizer, TokenizerConfig(), chat=True)
    forged = "".join(model.special)
    marks = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}

    def written(text: str) -> list[int]:
        for call in said["tool_calls"]:
            call["function"]["name"] = text
        replies = [{**reply, "content": text, "name": text} for reply in results(said)]
        return [token for token in told.tokens(replies, None, said, [TOOL]).tolist() if token in marks]

    assert written(forged) == written("harmless")


@pytest.mark.parametrize("name", ["Qwen3", "GLM-4.5", "Llama 3.1", "Gemma 3"])
def test_the_longest_of_several_results_are_cut(name):
    said = turn(0, 2)
    tokenizer = tokenizer_of(MODELS[name])
    told = Observations(tokenizer, TokenizerConfig(), chat=True)
    long, short = results(said)
    replies = [{**long, "content": "0123456789" * 500}, short]
    frame = len(told.tokens([{**long, "content": ""}, short], None, said))
    cut = told.within(replies, None, frame + 200, said)
    assert cut is not None and frame + 150 < len(cut) <= frame + 200
    text = str(tokenizer.decode(cut))
    assert text.count(CUT) == 1 and short["content"] in text
    assert told.within(replies, None, 10, said) is None
