"""Rows of TRL's formats give the tokens and loss masks of TRL's own code (golden/trl_rows.json)."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pipeline import config
from pipeline.data.mixture import build_streams

GOLDEN = Path(__file__).parent / "golden"
RECORDED = json.loads((GOLDEN / "trl_rows.json").read_text())
ROWS = RECORDED["rows"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE with ChatML, as Qwen's."""
    return PreTrainedTokenizerFast(
        tokenizer_file=str(GOLDEN / "tokenizer.json"), eos_token="<|im_end|>", chat_template=RECORDED["chat_template"]
    )


def is_chat(row: dict) -> bool:
    return any(isinstance(value, list) for value in row.values())


def items(algorithm: str, rows: list[dict], tokenizer: PreTrainedTokenizerBase, folder: Path, *overrides: str) -> list:
    """Return a step's items, read without columns in the recipe."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = ("data.train.dataset_name=null", f"data.train.data_path={path}", "data.validation=null", "data.shuffle=false")
    values += ("data.train.margin_key=null", "policy.max_total_sequence_length=128", f"{algorithm}.max_num_epochs=1")
    values += (f"{algorithm}.val_at_start=false", f"{algorithm}.val_at_end=false", f"{algorithm}.val_period=0")
    values += (f"data.apply_chat_template={str(is_chat(rows[0])).lower()}",)
    stream, _ = build_streams(config.load(f"tiny_{algorithm}", [*values, *overrides]), tokenizer)
    return stream.take(len(rows) + 1)


def without_newline(tokens: list[int], labelled: list[int], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return TRL's mask without the newline that ChatML writes after <|im_end|>."""
    newline = [i > 0 and tokens[i - 1] == tokenizer.eos_token_id for i in range(len(tokens))]
    assert all(tokenizer.decode([token]) == "\n" for token, is_one in zip(tokens, newline, strict=True) if is_one)
    return tokens, [int(label and not is_one) for label, is_one in zip(labelled, newline, strict=True)]


@pytest.mark.parametrize("recorded", [row for row in ROWS if row["algorithm"] == "sft"], ids=lambda row: str(row["row"])[:60])
def test_examples(recorded, tokenizer, tmp_path):
    (sample,) = items("sft", [recorded["row"]], tokenizer, tmp_path)
    tokens, labelled = without_newline(recorded["input_ids"], recorded["labelled"], tokenizer)
    if labelled[0]:
        labelled[0] = 0  # nothing comes before the first token: TRL's labels are shifted by one, which drops it
    assert sample.tokens.tolist() == tokens
    assert sample.loss_mask.tolist() == [bool(label) for label in labelled]


@pytest.mark.parametrize("algorithm", ["dpo", "rm"])
@pytest.mark.parametrize("recorded", [row for row in ROWS if row["algorithm"] == "dpo"], ids=lambda row: str(row["row"])[:60])
def test_pairs(recorded, algorithm, tokenizer, tmp_path):
    """A pair ends where the answer ends: a template's newline behind it is cut off."""
    ((chosen, rejected),) = items(algorithm, [recorded["row"]], tokenizer, tmp_path)
    for sample, key in ((chosen, "chosen_ids"), (rejected, "rejected_ids")):
        answer = recorded[key][: recorded[key].index(tokenizer.eos_token_id) + 1]
        assert sample.tokens.tolist() == recorded["prompt_ids"] + answer
        assert np.flatnonzero(sample.loss_mask).tolist() == [i + len(recorded["prompt_ids"]) for i in range(len(answer))]


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": "The sky is", "answer": "blue"}, "blue"),
        ({"question": "The sky is", "solution": "so", "answer": 4}, "4"),
        ({"problem": "The sky is", "solution": "blue"}, "blue"),
        ({"prompt": "The sky is", "completion": " blue"}, " blue"),
        ({"prompt": [{"role": "user", "content": "The sky is"}], "ground_truth": "blue"}, "blue"),
        ({"messages": [{"role": "user", "content": "The sky is"}, {"role": "assistant", "content": "blue"}]}, "blue"),
        ({"conversations": [{"from": "human", "value": "The sky is"}, {"from": "gpt", "value": "blue"}]}, "blue"),
    ],
    ids=str,
)
@pytest.mark.parametrize("algorithm", ["grpo", "distillation"])
def test_prompts(row, answer, algorithm, tokenizer, tmp_path):
    (prompt,) = items(algorithm, [row], tokenizer, tmp_path, "data.train.output_key=output")
    asked = [{"role": "user", "content": "The sky is"}]
    expected = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False) if is_chat(row) else None
    assert prompt.tokens.tolist() == (expected or tokenizer("The sky is").input_ids)
    assert prompt.task["answer"] == answer
