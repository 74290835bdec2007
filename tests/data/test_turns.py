"""Masks of templates that render a turn differently when more follows, prefill reasoning, or write tool calls."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.config import RECIPES, DataConfig, DatasetConfig, TokenizerConfig
from pipeline.data.chat import Encoder
from pipeline.data.preferences import encode_pair

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|end|>", "<|return|>", "<|endoftext|>", "<|call|>")
PREFILLED = (  # Qwen3.5: the generation prompt opens the reasoning, and only the last question's answer keeps it
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>\n{{ m.reasoning_content | default('') }}\n</think>\n\n"
    "{% endif %}{{ m.content.split('</think>')[-1] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if thinking is defined and not thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
TWO_ENDS = (  # gpt-oss: another token ends the conversation than a turn within it
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDED = (  # Phi-3: the conversation's end follows the turn's
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
OPEN = (  # GLM: nothing ends a turn but the beginning of the next
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CALLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }} ARGUMENTS</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AS_MAPPING = CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}")
AS_TEXT = CALLS.replace("ARGUMENTS", "{{ c.function.arguments }}")
CONCATENATED = AS_TEXT.replace("{{ c.function.arguments }}", "{{ '' + c.function.arguments }}")
BY_NULL = AS_MAPPING.replace(
    "m.tool_calls or []", "(m.tool_calls if m.content is none else [])"
)  # DeepSeek-R1's distilled models
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}ASSISTANT{% endif %}{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nPROMPT{% endif %}"
)
TRIMS = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}").replace("ASSISTANT", "").replace("PROMPT", "")
LINE = {"role": "user", "content": "one\n"}
QUESTION, LATER = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
TOOL = {
    "type": "function",
    "function": {"name": "sky", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def tokenizer(template: str) -> PreTrainedTokenizerBase:
    made = AutoTokenizer.from_pretrained(RECIPES / "tiny", chat_template=template)
    made.add_tokens(list(SPECIAL), special_tokens=True)
    made.add_tokens(["<think>", "</think>"])
    return made


def encoder(template: str, variables: dict | None = None, dataset: dict | None = None, **data) -> Encoder:
    columns = DatasetConfig(**(dataset or {"messages_key": "messages"}))
    return Encoder(tokenizer(template), TokenizerConfig(chat_template_kwargs=variables), DataConfig(**data), columns)


def said(content: str, **more) -> dict:
    return {"role": "assistant", "content": content, **more}


def learned(made: Encoder, record: dict) -> list[str]:
    tokens, mask = made.conversation(record)
    options = {"tools": record.get("tools"), **made.template.variables}
    assert tokens.tolist() == made.tokenizer.apply_chat_template(record["messages"], return_dict=False, **options)
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    return [str(made.tokenizer.decode(tokens[a:b])) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def test_what_the_generation_prompt_has_is_not_learned_and_what_the_template_drops_is_not_missed():
    one = {"messages": [QUESTION, said("uno", reasoning_content="dos")]}
    both = {"messages": [*one["messages"], LATER, said("tres", reasoning_content="no")]}
    assert learned(encoder(PREFILLED), one) == ["dos\n</think>\n\nuno<|im_end|>"]
    assert learned(encoder(PREFILLED), both) == ["uno<|im_end|>", "no\n</think>\n\ntres<|im_end|>"]


def test_an_empty_block_of_reasoning_is_learned_only_where_the_policy_writes_it():
    record = {"messages": [QUESTION, said("uno")]}
    assert learned(encoder(PREFILLED), record) == ["\n</think>\n\nuno<|im_end|>"]
    assert learned(encoder(PREFILLED, {"thinking": False}), record) == ["uno<|im_end|>"]
    assert learned(encoder(PREFILLED, {"thinking": False}, learn_prefilled=True), record) == [
        "<think>\n\n</think>\n\nuno<|im_end|>"
    ]


def test_the_end_of_a_turn_is_the_one_that_the_conversation_has():
    turns = [QUESTION, said("uno"), LATER, said("dos")]
    assert learned(encoder(TWO_ENDS), {"messages": turns}) == ["uno<|end|>", "dos<|return|>"]
    assert learned(encoder(ENDED), {"messages": turns}) == ["uno<|end|>", "dos<|end|>"]
    assert learned(encoder(OPEN), {"messages": turns}) == ["uno<|user|>", "dos"]  # its models stop at the next opening


@pytest.mark.parametrize(("template", "each"), [(PREFILLED, 4), (TWO_ENDS, 2), (ENDED, 4), (OPEN, 3), (TRIMS, 2)])
def test_turns_take_few_renderings(template, each, monkeypatch):
    made = encoder(template)
    render, rendered = made.template.text, []
    monkeypatch.setattr(made.template, "text", lambda *given, **options: rendered.append(1) or render(*given, **options))
    turns = [turn for n in range(20) for turn in (LINE, said(f"uno {n}", reasoning_content=f"dos {n}"))]
    texts = learned(made, {"messages": turns})
    assert len(texts) == 20 and all(f"uno {n}" in text for n, text in enumerate(texts))
    assert len(rendered) <= each * 20 + 6


# Templates that look at more than roles. A user, an answer, a user, an answer, a user, an answer; the second ones differ.
NO_THINK = CHATML.replace("ASSISTANT", "<think>\n{{ m.reasoning_content | default('') }}\n</think>\n\n").replace(
    "PROMPT", "{% if messages[-1].content.endswith('/no_think') %}<think>\n\n</think>\n\n{% endif %}"
)
NAMED = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if m.name %}\n-- {{ m.name }}{% endif %}")
STOPPED = CHATML.replace("<|im_end|>\n", "{% if m.stop is undefined or m.stop %}<|im_end|>{% endif %}\n")
HIDDEN = CHATML.replace("{{ m.content }}", "{{ m.content if not m.content.startswith('(hidden)') }}")
CUT = CHATML.replace("{{ m.content }}", "{{ m.content[:10] }}")


@pytest.mark.parametrize(
    ("template", "question", "answer", "expected"),
    [
        (NO_THINK, {"content": "two /no_think"}, {}, ["\n\n</think>\n\nuno<|im_end|>", "uno<|im_end|>"]),
        (NAMED, {"name": "sky"}, {}, ["uno<|im_end|>"] * 2),
        (STOPPED, {}, {"stop": False}, ["uno<|im_end|>", "uno"]),
        (HIDDEN, {"content": "(hidden) two"}, {}, ["uno<|im_end|>"] * 2),
        (CUT, {"content": "two two two two"}, {}, ["uno<|im_end|>"] * 2),
        (CHATML, {"content": "two Qx7mx3x Qx7m"}, {"content": "uno"}, ["uno<|im_end|>"] * 2),
        (TRIMS, {"content": " two \n"}, {}, ["uno<|im_end|>"] * 2),
    ],
)
def test_a_template_may_look_at_any_message(template, question, answer, expected):
    template = template.replace("ASSISTANT", "").replace("PROMPT", "")
    usual, other = [QUESTION, said("uno")], [QUESTION | question, said("uno") | answer]
    first, second = (text.removeprefix("<think>") for text in expected)
    found = learned(encoder(template), {"messages": usual + other + usual})
    assert [text.removeprefix("<think>").rstrip("\n") for text in found] == [first, second, first]


JOINED = (  # turns of one role have one header
    "{% set ns = namespace(role='') %}{% for m in messages %}{% if m.role != ns.role %}<|{{ m.role }}|>{% endif %}"
    "{% set ns.role = m.role %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ONE_END = OPEN.replace("{% endfor %}", "{% if m.role == 'assistant' and loop.last %}<|end|>{% endif %}{% endfor %}")
SYSTEM_LAST = (  # the last user's turn has the system's text
    "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'user' and m == messages[-2] %}{{ messages[0].content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SYSTEM = {"role": "system", "content": "no"}


@pytest.mark.parametrize("template", [OPEN, JOINED])
def test_turns_of_the_assistant_may_follow_each_other(template):
    made = encoder(template)
    tokens, mask = made.conversation({"messages": [QUESTION, said("uno"), said("dos")]})
    assert made.tokenizer.decode(tokens[mask]) == "unodos"


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (ONE_END, [QUESTION, said("uno"), said("dos")]),  # nothing shows whether the second header belongs to a turn
        (SYSTEM_LAST, [SYSTEM, QUESTION, said("uno"), LATER, said("dos")]),
    ],
)
def test_turns_whose_borders_are_not_in_order_are_refused(template, messages):
    with pytest.raises(ValueError, match=r"the chat template (hides where|writes text of) message \d"):
        encoder(template).conversation({"messages": messages})


def test_a_turn_that_the_template_puts_another_message_into_is_refused():
    """Gemma 4 writes a tool's result before the text of the turn that calls the tool."""
    inside = (
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}<tool_call>"
        "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}"
        "{% if not loop.last %}<|call|>{{ loop.nextitem.content }}{% endif %}{% endif %}{{ m.content or '' }}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    record = {"messages": [QUESTION, called({"city": "no"}, "uno"), *ANSWERED], "tools": [TOOL]}
    with pytest.raises(ValueError, match="writes text of message 2 inside message 1, a turn of the assistant"):
        encoder(inside).conversation(record)


def test_a_pair_ends_where_its_answer_does():
    made = encoder(ENDED, dataset={"input_key": "prompt"})
    chosen, rejected = encode_pair(made, 0, {"prompt": "one", "chosen": "uno", "rejected": "dos"})
    texts = [made.tokenizer.decode(sample.tokens) for sample in (chosen, rejected)]
    assert texts == ["<|user|>\none<|end|>\n<|assistant|>\nuno<|end|>", "<|user|>\none<|end|>\n<|assistant|>\ndos<|end|>"]


# ---- tools ------------------------------------------------------------------------------------------------------------


def called(arguments, content=None) -> dict:
    return {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "sky", "arguments": arguments}}]}


ANSWERED = [{"role": "tool", "name": "sky", "content": "no"}, said("uno")]


@pytest.mark.parametrize("given", [{"city": "no"}, '{"city": "no"}'], ids=["mapping", "text"])
@pytest.mark.parametrize(
    "template", [AS_MAPPING, AS_TEXT, CONCATENATED, BY_NULL], ids=["mapping", "text", "concatenated", "by null"]
)
def test_arguments_are_written_once_in_the_templates_form(template: str, given):
    made = encoder(template)
    tokens, mask = made.conversation({"messages": [QUESTION, called(given), *ANSWERED], "tools": json.dumps([TOOL])})
    arguments = {"city": "no"} if "tojson }}<" in template else '{"city": "no"}'
    reference = [QUESTION, called(arguments), *ANSWERED]
    assert tokens.tolist() == made.tokenizer.apply_chat_template(reference, tools=[TOOL], return_dict=False)
    first = np.flatnonzero(mask)[0]
    assert made.tokenizer.decode(tokens[first : first + 11]) == "<tool_call>"


def test_tools_and_variables_of_a_record_reach_prompts_examples_and_pairs():
    record = {"tools": [TOOL], "chat_template_kwargs": {"thinking": False}}
    with_tools = (
        AS_MAPPING + "{% if add_generation_prompt and thinking is defined and not thinking %}<think></think>{% endif %}"
    )
    made = encoder(with_tools, {"thinking": True})
    prompt = made.prompt({"messages": [QUESTION], **record})
    options = {"tools": [TOOL], "thinking": False, "return_dict": False}
    assert prompt.tolist() == made.tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, **options)
    tokens, _ = made.conversation({"messages": [QUESTION, said("uno")], **record})
    assert tokens.tolist() == made.tokenizer.apply_chat_template([QUESTION, said("uno")], **options)
    pairs = encoder(with_tools, dataset={"input_key": "prompt"})
    chosen, _ = encode_pair(pairs, 0, {"prompt": [QUESTION], "chosen": "uno", "rejected": "dos", **record})
    assert tokens.tolist()[: len(chosen.tokens)] == chosen.tokens.tolist()


def test_pairs_may_differ_in_tool_calls_alone():
    pairs = encoder(AS_MAPPING, dataset={"input_key": "prompt"})
    record = {"prompt": [QUESTION], "chosen": [called({"city": "no"})], "rejected": [called({"city": "one"})]}
    chosen, rejected = encode_pair(pairs, 0, record)
    assert [str(pairs.tokenizer.decode(s.tokens[s.loss_mask])).endswith("</tool_call><|im_end|>") for s in (chosen, rejected)]
    assert not np.array_equal(chosen.tokens, rejected.tokens)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"messages": [QUESTION, called({})]}, "renders no tool_calls"),
        ({"messages": [QUESTION, said("uno")], "tools": "sky"}, "not JSON"),
        ({"messages": [QUESTION, said("uno")], "tools": ["sky"]}, "list of JSON schemas"),
        ({"messages": [QUESTION, said("uno")], "chat_template_kwargs": {"tokenize": True}}, "tokenize"),
        ({"messages": [QUESTION, called("no JSON")]}, "not JSON"),
        ({"messages": [QUESTION, called([1])]}, "not an object"),
        ({"messages": [QUESTION, said(None)]}, "not a list of"),
    ],
)
def test_what_no_template_can_show_is_a_bad_record(record: dict, says: str):
    with pytest.raises(ValueError, match=says):
        encoder(TWO_ENDS).conversation(record)
