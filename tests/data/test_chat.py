"""Masks token by token, with ChatML, Llama 3's template, one with generation blocks, and a wrong one."""

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.config import RECIPES, DataConfig, DatasetConfig, TokenizerConfig
from pipeline.data.chat import Encoder, load_tokenizer
from pipeline.data.stream import encode_prompt
from tests.problems import refused

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKED_BEYOND = (  # ChatML, with its newline in the mark
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{{ '\n' }}{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_SHORT = MARKED_BEYOND.replace("<|im_end|>{{ '\n' }}{% endgeneration %}", "{% endgeneration %}<|im_end|>{{ '\n' }}")
MARKED_ENDLESS = MARKED_BEYOND.replace("<|im_end|>{{ '\n' }}{% endgeneration %}", "{% endgeneration %}")
MARKED_LLAMA3 = LLAMA3.replace(
    "{{ m.content | trim }}<|eot|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}<|eot|>{% endgeneration %}"
    "{% else %}{{ m.content | trim }}<|eot|>{% endif %}",
)
FORGETFUL = (  # as reasoning models' templates do: only the last answer keeps its <think>
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "uno"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "dos"},
]


def tokenizer(template: str | None) -> PreTrainedTokenizerBase:
    loaded = load_tokenizer(TokenizerConfig(name=str(RECIPES / "tiny"), chat_template=template))
    loaded.add_tokens(["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"], special_tokens=True)
    return loaded


def encoder(template: str | None, dataset: DatasetConfig | None = None, **options) -> Encoder:
    config = TokenizerConfig(chat_template_kwargs=options.pop("chat_template_kwargs", None))
    return Encoder(tokenizer(template), config, DataConfig(**options), dataset or DatasetConfig(messages_key="messages"))


def learned(encoder: Encoder, record: dict) -> tuple[str, list[str]]:
    """Return the text, and the parts of it that the loss counts."""
    tokens, mask = encoder.conversation(record)
    assert (tokens.dtype, mask.dtype, len(tokens)) == (np.int32, np.bool_, len(mask))
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    spans = [encoder.tokenizer.decode(tokens[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return encoder.tokenizer.decode(tokens), spans


def test_chatml_two_turns_without_the_unsampled_newline():
    text, spans = learned(encoder(CHATML), {"messages": TURNS})
    assert text == "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in TURNS)
    assert spans == ["uno<|im_end|>", "dos<|im_end|>"]


def test_chatml_mask_token_by_token():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}, *TURNS[3:]]
    tokens, mask = encoder(CHATML).conversation({"messages": turns})
    marked = [("*" if counted else "") + piece for piece, counted in zip(pieces(tokens), mask, strict=True)]
    first = ["<|im_start|>", *"user\na", "<|im_end|>", "\n", "<|im_start|>", *"assistant\n", "*b", "*\n", "*<|im_end|>", "\n"]
    second = [
        "<|im_start|>",
        *"user\ntwo",
        "<|im_end|>",
        "\n",
        "<|im_start|>",
        *"assistant\n",
        "*d",
        "*o",
        "*s",
        "*<|im_end|>",
        "\n",
    ]
    assert marked == first + second


def pieces(tokens: np.ndarray) -> list[str]:
    decoder = tokenizer(None)
    return [decoder.decode([token]) for token in tokens]


def test_llama3_two_turns():
    text, spans = learned(encoder(LLAMA3), {"messages": TURNS})
    assert text.startswith("<s><|start|>system<|end|>\n\nbe brief<|eot|><|start|>user")
    assert spans == ["uno<|eot|>", "dos<|eot|>"]


def test_a_template_that_marks_what_is_generated():
    text, spans = learned(encoder(MARKED), {"messages": TURNS})
    assert text.endswith("assistant: dos<|im_end|>\n")
    assert spans == ["uno<|im_end|>", "dos<|im_end|>"]


@pytest.mark.parametrize(
    ("marked", "plain"),
    [(MARKED_BEYOND, CHATML), (MARKED_SHORT, CHATML), (MARKED_LLAMA3, LLAMA3)],
    ids=["the newline too", "the content only", "up to the next turn"],
)
def test_learned_tokens_end_with_the_turn_wherever_the_marks_end(marked: str, plain: str):
    for turns in (TURNS, TURNS[:4], TURNS[:3]):
        assert learned(encoder(marked), {"messages": turns}) == learned(encoder(plain), {"messages": turns})


def test_the_start_of_the_next_turn_is_not_learned():
    text, spans = learned(encoder(MARKED_ENDLESS), {"messages": TURNS})
    assert "uno<|im_start|>" in text
    assert spans == ["uno", "dos"]


def test_a_template_that_rewrites_earlier_turns_is_learned_as_it_renders_the_whole():
    text, spans = learned(encoder(FORGETFUL), {"messages": TURNS})
    assert text == str(tokenizer(FORGETFUL).apply_chat_template(TURNS, tokenize=False))
    assert spans == ["uno<|im_end|>", "<think>dos<|im_end|>"]
    _, spans = learned(encoder(FORGETFUL), {"messages": TURNS[:3]})
    assert spans == ["<think>uno<|im_end|>"]


def test_prompt_and_conversation_begin_alike(tmp_path: Path):
    (tmp_path / "prompt.txt").write_text("Put it in \\boxed{{}}: {}!")
    (tmp_path / "system.txt").write_text("be brief\n")
    dataset = DatasetConfig(prompt_file=str(tmp_path / "prompt.txt"), system_prompt_file=str(tmp_path / "system.txt"))
    made = encoder(CHATML, dataset)
    record = {"input": "a {b} c", "output": 7}
    prompt = made.prompt(record)
    assert prompt.dtype == np.int32
    assert made.tokenizer.decode(prompt) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nput it in <unk>boxed<unk><unk>: a <unk>b<unk> c!<|im_end|>\n"
        "<|im_start|>assistant\n"
    ).replace("put", "<unk>ut")
    tokens, mask = made.conversation(record)
    assert tokens[: len(prompt)].tolist() == prompt.tolist()
    assert made.tokenizer.decode(tokens[mask]) == "7<|im_end|>"
    assert not mask[: len(prompt)].any()
    assert made.answer(record) == "7"
    task = encode_prompt(made, 0, record).task
    assert task == {"messages": made.question(record), "answer": "7"}
    assert [message["role"] for message in task["messages"]] == ["system", "user"]


def test_template_kwargs_reach_the_template():
    template = CHATML + "{% if add_generation_prompt and thinking %}<think>{% endif %}"
    made = encoder(template, DatasetConfig(), chat_template_kwargs={"thinking": True})
    assert made.tokenizer.decode(made.prompt({"input": "a"})).endswith("assistant\n<think>")


def test_bare_text_learns_the_answer_and_the_end():
    made = encoder(None, DatasetConfig(), apply_chat_template=False)
    text, spans = learned(made, {"input": "1+1=", "output": "2"})
    assert text == "<s>1+1=2</s>"
    assert spans == ["2</s>"]
    assert made.tokenizer.decode(made.prompt({"input": "1+1="})) == "<s>1+1="


def test_conversations_that_do_not_fit_the_template_are_refused(tmp_path: Path):
    with refused(("policy.tokenizer.chat_template", "missing-value")):
        encoder(None)
    (tmp_path / "system.txt").write_text("be brief")
    with refused(("data", "contradiction")):
        encoder(None, DatasetConfig(system_prompt_file=str(tmp_path / "system.txt")), apply_chat_template=False)
    for text in ("none", "{} and {}", "{input}", "\\boxed{}{"):
        (tmp_path / "prompt.txt").write_text(text)
        with pytest.raises(ValueError, match=r"prompt\.txt"):
            encoder(CHATML, DatasetConfig(prompt_file=str(tmp_path / "prompt.txt")))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": TURNS[:2]}, "expected an assistant's turn"),
        ({"messages": TURNS[2:]}, "an assistant's turn, but not as the first turn"),
        ({"messages": "hello"}, "not a list of"),
        ({"messages": [{"role": "user"}]}, "not a list of"),
        ({"messages": [*TURNS[:2], {"role": "assistant", "content": None}]}, "not a list of"),
        ({"messages": []}, "not a list of"),
        ({}, "not a list of"),
    ],
)
def test_malformed_conversations_are_refused(record: dict, message: str):
    with pytest.raises(ValueError, match=message):
        encoder(CHATML).conversation(record)


def test_a_template_that_marks_nothing_is_refused():
    silent = MARKED.replace("m.role == 'assistant'", "m.role == 'bot'")
    with pytest.raises(ValueError, match="renders no text of the assistant"):
        encoder(silent).conversation({"messages": TURNS})


def test_an_input_that_is_not_text_is_refused():
    made = encoder(CHATML, DatasetConfig())
    for value, says in ((None, "a NoneType, not a string"), (True, "a bool, not a string"), (["a"], "not a list of {role")):
        with pytest.raises(ValueError, match=f"'input' is {says}"):
            made.prompt({"input": value})


def test_the_tokenizers_own_template_is_kept_unless_the_recipe_gives_one(tmp_path: Path):
    tokenizer(CHATML).save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == CHATML
    assert load_tokenizer(TokenizerConfig(name=str(tmp_path))).chat_template == CHATML
    assert load_tokenizer(TokenizerConfig(name=str(tmp_path), chat_template=LLAMA3)).chat_template == LLAMA3
