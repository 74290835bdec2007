"""Pairs, token by token, from every supported format of preference data."""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from pipeline.config import RECIPES, DataConfig, DatasetConfig, TokenizerConfig
from pipeline.data.chat import Encoder
from pipeline.data.datasets import record_location
from pipeline.data.preferences import SplitPairs, encode_labeled, encode_pair
from pipeline.data.stream import PairStream
from tests.data.test_chat import CHATML, FORGETFUL, LLAMA3, MARKED, MARKED_BEYOND, MARKED_SHORT, encoder

PROMPT = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "uno"}, {"role": "user", "content": "two"}]
DOS, TRES = ([{"role": "assistant", "content": text}] for text in ("dos", "tres"))


def read(encoder: Encoder, record: dict) -> list[tuple[str, str]]:
    """Return (prompt, part that the loss counts) of the chosen and the rejected sequence."""
    found = []
    for sample in encode_pair(encoder, 0, record):
        (begin,) = np.flatnonzero(np.diff(sample.loss_mask.astype(int))) + 1  # one stretch, up to the end
        assert sample.loss_mask[-1] and sample.tokens.dtype == np.int32
        assert len(sample.logprobs) == len(sample.advantages) == len(sample.tokens)
        found.append(tuple(encoder.tokenizer.decode(part) for part in (sample.tokens[:begin], sample.tokens[begin:])))
    return found


def chat(template: str = CHATML, **dataset) -> Encoder:
    return encoder(template, DatasetConfig(**dataset))


def bare(**dataset) -> Encoder:
    data = DataConfig(apply_chat_template=False, max_input_seq_length=9, overlong_prompts="drop")
    return Encoder(AutoTokenizer.from_pretrained(RECIPES / "tiny"), TokenizerConfig(), data, DatasetConfig(**dataset))


def test_bare_texts():
    made = bare()
    assert read(made, {"input": "1+1=", "chosen": "2", "rejected": 3}) == [("<s>1+1=", "2</s>"), ("<s>1+1=", "3</s>")]


def test_texts_with_a_chat_template():
    before = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    record = {"input": "one", "chosen": "uno", "rejected": "dos"}
    assert read(chat(), record) == [(before, "uno<|im_end|>"), (before, "dos<|im_end|>")], "without the newline behind"


BEFORE = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in PROMPT) + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("dataset", "record"),
    [
        ({"messages_key": "prompt"}, {"prompt": PROMPT, "chosen": "dos", "rejected": "tres"}),
        ({"messages_key": "prompt"}, {"prompt": PROMPT, "chosen": DOS, "rejected": TRES}),
        ({}, {"chosen": PROMPT + DOS, "rejected": PROMPT + TRES}),
        ({}, {"input": "not looked at", "chosen": PROMPT + DOS, "rejected": PROMPT + TRES}),
        ({"chosen_key": "good", "rejected_key": "bad"}, {"good": PROMPT + DOS, "bad": PROMPT + TRES}),
    ],
    ids=["texts", "last turns", "whole conversations", "and a prompt besides", "other keys"],
)
def test_every_form_gives_the_same_pair(dataset: dict, record: dict):
    """The assistant's turn in the prompt does not count."""
    assert read(chat(**dataset), record) == [(BEFORE, "dos<|im_end|>"), (BEFORE, "tres<|im_end|>")]


def test_last_turns_after_an_input():
    before = "<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    record = {"input": "two", "chosen": DOS, "rejected": TRES}
    assert read(chat(), record) == [(before, "dos<|im_end|>"), (before, "tres<|im_end|>")]


TEMPLATES = {
    "Llama 3": (LLAMA3, "%s<|eot|>"),
    "generation marks": (MARKED, "%s<|im_end|>"),
    "marks that take in the newline": (MARKED_BEYOND, "%s<|im_end|>"),
    "marks of the content only": (MARKED_SHORT, "%s<|im_end|>"),
    "rewrites earlier turns": (FORGETFUL, "<think>%s<|im_end|>"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_other_templates(name: str):
    """Each answer ends in the token that sampling stops at, where a reward model's score is read."""
    template, answer = TEMPLATES[name]
    (prompt, chosen), (same, rejected) = read(chat(template), {"chosen": PROMPT + DOS, "rejected": PROMPT + TRES})
    assert prompt == same and "uno" in prompt
    assert (chosen, rejected) == (answer % "dos", answer % "tres")


def test_the_system_prompt_comes_first(tmp_path):
    (tmp_path / "system.txt").write_text("be brief")
    made = chat(system_prompt_file=str(tmp_path / "system.txt"))
    for record in ({"input": "two", "chosen": "dos", "rejected": "tres"}, {"chosen": PROMPT + DOS, "rejected": PROMPT + TRES}):
        chosen, rejected = (prompt for prompt, _ in read(made, record))
        assert chosen.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user") and chosen == rejected


def test_conversations_that_differ_early_count_every_assistant_turn_from_there():
    question = {"role": "user", "content": "more"}
    record = {"chosen": PROMPT + DOS + [question] + TRES, "rejected": PROMPT + TRES + [question] + DOS}
    made = chat()
    chosen, _ = encode_pair(made, 0, record)
    edges = np.flatnonzero(np.diff(np.concatenate([chosen.loss_mask, [False]]).astype(int))) + 1
    assert made.tokenizer.decode(chosen.tokens[: edges[0]]) == BEFORE
    assert [made.tokenizer.decode(chosen.tokens[a:b]) for a, b in (edges[:2], edges[2:])] == ["dos<|im_end|>", "tres<|im_end|>"]


def test_the_margin_is_on_the_chosen_sequence():
    record = {"input": "1+1=", "chosen": "2", "rejected": "3", "gap": 2}
    assert [sample.reward for sample in encode_pair(bare(margin_key="gap"), 0, record)] == [2.0, 0.0]
    assert [sample.reward for sample in encode_pair(bare(), 0, record)] == [0.0, 0.0]


def labeled(encoder: Encoder, *records: dict) -> list[tuple[str, float]]:
    """Return (part that the loss counts, reward) of each answer."""
    samples = [encode_labeled(encoder, 0, record) for record in records]
    return [(encoder.tokenizer.decode(sample.tokens[sample.loss_mask]), sample.reward) for sample in samples]


def test_labeled_answers():
    labels = (True, "False", 1, "0.0")
    records = [{"input": "1+1=", "output": str(i), "label": label} for i, label in enumerate(labels)]
    assert labeled(bare(), *records) == [("0</s>", 1.0), ("1</s>", 0.0), ("2</s>", 1.0), ("3</s>", 0.0)]
    conversation = {"input": PROMPT, "output": DOS, "label": False}
    assert labeled(chat(), conversation) == [("dos<|im_end|>", 0.0)], "without the assistant's turn in the prompt"
    for wrong, message in (({"label": "good"}, "'label' is 'good'; expected true or false"), ({}, "has no 'label'")):
        with pytest.raises(ValueError, match=message):
            encode_labeled(bare(), 0, {"input": "1+1=", "output": "2", **wrong})


def test_pairs_are_split_into_labeled_answers():
    answers = SplitPairs([{"input": f"{i}+1=", "chosen": str(i + 1), "rejected": "9"} for i in range(2)])
    found = labeled(bare(label_key=None), *(record for i in range(len(answers)) for record in answers[i]))
    assert found == [("1</s>", 1.0), ("9</s>", 0.0), ("2</s>", 1.0), ("9</s>", 0.0)]
    assert record_location(answers, 3) == "record 1 (from 0)"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"input": "1", "chosen": "2"}, "has no 'rejected'"),
        ({"chosen": "2", "rejected": "3"}, "has no 'input'"),
        ({"input": "1", "chosen": "2", "rejected": "2"}, "'chosen' and 'rejected' are the same"),
        ({"input": "1", "chosen": "2", "rejected": " "}, "'rejected' is empty"),
        ({"input": "1", "chosen": {"text": "2"}, "rejected": "2"}, "'chosen' is a dict, not a string or a number"),
        (
            {"input": "1", "chosen": DOS, "rejected": "2"},
            "one of 'chosen' and 'rejected' is a list of messages and the other is not",
        ),
        ({"input": "1", "chosen": DOS, "rejected": [{"role": "assistant"}]}, "'rejected' is not a list of"),
        ({"chosen": PROMPT + DOS, "rejected": PROMPT}, r"does not end in an answer of the assistant; the roles are \['user'"),
        ({"chosen": PROMPT + DOS, "rejected": PROMPT + DOS}, "are the same"),
        ({"chosen": PROMPT + DOS, "rejected": PROMPT[2:] + DOS}, "their first difference is not an assistant's turn"),
        ({"chosen": PROMPT + DOS, "rejected": DOS}, "their first difference is not an assistant's turn"),
        ({"chosen": PROMPT[:2], "rejected": PROMPT + DOS}, "their first difference is not an assistant's turn"),
    ],
)
def test_malformed_pairs_are_refused(record: dict, message: str):
    with pytest.raises(ValueError, match=message):
        encode_pair(chat(), 0, record)


@pytest.mark.parametrize("margin", [None, "two", True, float("nan")])
def test_a_margin_that_is_not_a_number_is_refused(margin):
    with pytest.raises(ValueError, match=r"'gap' is .*, not a finite number"):
        encode_pair(bare(margin_key="gap"), 0, {"input": "1", "chosen": "2", "rejected": "3", "gap": margin})
    with pytest.raises(ValueError, match="has no 'gap'"):
        encode_pair(bare(margin_key="gap"), 0, {"input": "1", "chosen": "2", "rejected": "3"})


def test_messages_without_a_chat_template_and_a_prompt_that_ends_in_an_answer_are_refused():
    with pytest.raises(ValueError, match=r"data\.apply_chat_template is false"):
        encode_pair(bare(), 0, {"chosen": PROMPT + DOS, "rejected": PROMPT + TRES})
    with pytest.raises(ValueError, match="must end before the assistant's answer"):
        encode_pair(chat(messages_key="prompt"), 0, {"prompt": PROMPT[:2], "chosen": "a", "rejected": "b"})


# ---- the stream -------------------------------------------------------------------------------------------------------

RECORDS = [{"input": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(1, 8)]


def test_resumes_to_the_pair():
    def pairs() -> PairStream:
        return PairStream(RECORDS, bare(), seed=5, max_num_epochs=3)

    def texts(taken: list) -> list[tuple[list[int], list[int]]]:
        return [(chosen.tokens.tolist(), rejected.tokens.tolist()) for chosen, rejected in taken]

    whole, first, second = texts(pairs().take(21)), pairs(), pairs()
    assert len({json.dumps(pair) for pair in whole}) == 7
    taken = texts(first.take(9))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert taken + texts(second.take(100)) == whole


def test_a_pair_is_too_long_if_one_answer_is():
    """Nine tokens: <s>, four of the prompt, the answer's and </s>."""
    records = [
        *RECORDS,
        {"input": "1+1=", "chosen": "2", "rejected": "1234"},
        {"input": "1+1=", "chosen": "1234", "rejected": "2"},
    ]
    stream = PairStream(records, bare(), seed=0)
    assert stream.dropped_at_start == 2 and len(stream.take(100)) == 7
    strict = bare()
    strict.data.overlong_prompts = "error"
    with pytest.raises(ValueError, match=r"record 7 \(from 0\): 10 tokens are more than data.max_input_seq_length 9"):
        PairStream(records, strict, seed=0)
