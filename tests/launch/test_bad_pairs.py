"""Pairs that are none are refused at submission, with file and line."""

import json
from pathlib import Path

import pytest

from launch.preflight import files
from pipeline import config
from pipeline.config import RecipeError
from tests.launch.model import write_model

GOOD = {"input": "1+1=", "chosen": "2", "rejected": "3", "gap": 1}
USER, RIGHT, WRONG = ({"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c")))
CHAT = ("data.apply_chat_template=true", "policy.tokenizer.chat_template=x")


def check(folder: Path, records: list, *overrides: str, algorithm: str = "dpo") -> None:
    write_model(folder / "model")
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "pairs.yaml").write_text(
        f"algorithm: {algorithm}\n"
        f"policy: {{model_name: {folder / 'model'}, random_init: true, max_total_sequence_length: 32}}\n"
        f"data: {{apply_chat_template: false, train: {{data_path: {folder / 'data.jsonl'}}}}}\n"
    )
    config.refuse(files.problems(config.load(str(folder / "pairs.yaml"), list(overrides))))


@pytest.mark.parametrize(
    ("records", "overrides"),
    [
        ([GOOD], ()),
        ([GOOD], ("data.train.margin_key=gap",)),
        ([GOOD], CHAT),
        ([{"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}], CHAT),
        ([{"input": "a", "chosen": [RIGHT], "rejected": [WRONG]}], CHAT),
        ([{"prompt": [USER], "chosen": "b", "rejected": "c"}], (*CHAT, "data.train.messages_key=prompt")),
    ],
)
@pytest.mark.parametrize("algorithm", ["dpo", "rm"])
def test_good_pairs(tmp_path, records, overrides, algorithm):
    check(tmp_path, records, *overrides, algorithm=algorithm)


@pytest.mark.parametrize(
    ("record", "overrides", "says"),
    [
        ({"input": "1", "chosen": "2"}, (), "has no 'rejected'; it has: input, chosen"),
        ({"chosen": "2", "rejected": "3"}, (), "has no 'input'"),
        ({"input": "1", "chosen": "2", "rejected": "2"}, (), "'chosen' and 'rejected' are the same"),
        ({"input": "1", "chosen": "", "rejected": "2"}, (), "'chosen' is empty"),
        ({"input": "1", "chosen": {"text": "2"}, "rejected": "2"}, (), "'chosen' is a dict, not a text or a number"),
        ({"input": "1", "chosen": [RIGHT], "rejected": "2"}, CHAT, "one is a list of messages and the other is not"),
        ({"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, (), "list of messages, and data.apply_chat_template is false"),
        ({"chosen": [USER, RIGHT], "rejected": [USER]}, CHAT, "'rejected' does not end in an answer of the assistant's"),
        ({"chosen": [USER, RIGHT], "rejected": [{"role": "user"}]}, CHAT, "'rejected' is not a list of {role, content}"),
        (GOOD | {"gap": "wide"}, ("data.train.margin_key=gap",), "'gap' is 'wide', not a number"),
        (GOOD, ("data.train.margin_key=margin",), "has no 'margin'"),
        (
            {"prompt": [USER, RIGHT], "chosen": "b", "rejected": "c"},
            (*CHAT, "data.train.messages_key=prompt"),
            "'prompt' must end where the assistant is to answer",
        ),
    ],
)
def test_bad_pairs(tmp_path, record, overrides, says):
    first = GOOD | {"prompt": [USER], "margin": 1}
    with pytest.raises(RecipeError) as error:
        check(tmp_path, [first, record], *overrides)
    assert f"{tmp_path / 'data.jsonl'}:2: " in str(error.value) and says in str(error.value)


def test_a_prompt_that_is_too_long(tmp_path):
    with pytest.raises(RecipeError, match=r"data\.jsonl:2: a prompt of \d+ tokens"):
        check(tmp_path, [GOOD, GOOD | {"input": "1+" * 40}], "data.max_input_seq_length=20")


def test_bad_pairs_may_be_passed_over(tmp_path):
    same = GOOD | {"rejected": "2"}
    check(tmp_path / "one", [GOOD, same], "data.bad_records=drop")
    with pytest.raises(RecipeError, match=r"data\.jsonl:2: .* are the same.*; mend it, or data\.bad_records=drop"):
        check(tmp_path / "two", [GOOD, same])
