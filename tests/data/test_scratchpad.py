import re
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pipeline import config
from pipeline.data.scratchpad import addition, preferences, write_tokenizer

TINY = config.RECIPES / "tiny"


def test_every_line_of_the_scratchpad_is_correct():
    records = addition("train", 2000, seed=3)
    assert len(records) == 2000
    for record in records:
        a, b = map(int, record["input"].rstrip("=").split("+"))
        scratchpad, answer = record["output"].split(";")
        assert answer == record["answer"] == str(a + b)
        columns = scratchpad.split(",")
        assert len(columns) == max(len(str(a)), len(str(b)))
        totals = [(sum(map(int, left.split("+"))), int(right)) for left, right in (column.split("=") for column in columns)]
        assert all(total == written for total, written in totals)
        assert int("".join(str(t % 10) for t, _ in totals[-2::-1]) or 0) <= a + b
        assert f"{totals[-1][1]}{''.join(str(t % 10) for t, _ in totals[-2::-1])}" == answer


def test_known_sums():
    outputs = {record["input"]: record["output"] for record in addition("train", 30_000, seed=0, digits=2)}
    assert outputs["47+85="] == "7+5=12,4+8+1=13;132"
    assert outputs["20+11="] == "0+1=1,2+1=3;31"


def test_mistakes_are_in_the_demonstration_and_not_in_the_answer():
    careful = addition("train", 4000, seed=0, digits=2)
    assert all(record["output"].endswith(f";{record['answer']}") for record in careful)
    careless = addition("train", 4000, seed=0, digits=2, mistakes=0.25)
    assert all(eval(record["input"].rstrip("=")) == int(record["answer"]) for record in careless)
    wrong_columns, right = 0, 0
    for record in careless:
        scratchpad, result = record["output"].split(";")
        columns = [column.split("=") for column in scratchpad.split(",")]
        wrong_columns += sum(sum(map(int, left.split("+"))) != int(total) for left, total in columns)
        assert result == f"{int(columns[1][1])}{columns[0][1][-1]}", "the result is what the columns say"
        right += result == record["answer"]
    assert wrong_columns / 8000 == pytest.approx(0.25, abs=0.02)
    assert right / 4000 == pytest.approx(0.75**2, abs=0.03)


def test_a_long_tail():
    """The share of long sums is as given; without a share the sums do not change."""
    skewed = addition("train", 4000, seed=0, digits=1, long_share=0.1, long_digits=[6, 7])
    lengths = [len(record["output"]) for record in skewed]
    assert sum(length > 30 for length in lengths) / 4000 == pytest.approx(0.1, abs=0.015)
    assert all(length < 10 or length > 30 for length in lengths)
    assert all(eval(record["input"].rstrip("=")) == int(record["answer"]) for record in skewed)
    assert addition("train", 50, seed=0, digits=2, long_digits=9) == addition("train", 50, seed=0, digits=2)
    for wrong in ({"long_share": 1.0, "long_digits": 3}, {"long_share": 0.5}, {"long_share": 0.5, "long_digits": [0]}):
        with pytest.raises(ValueError, match=r"long_share|long_digits"):
            addition("train", 5, seed=0, **wrong)


def wrong_columns(demonstration: str) -> int:
    columns, result = demonstration.split(";")
    totals = [(sum(map(int, left.split("+"))), total) for left, total in (column.split("=") for column in columns.split(","))]
    assert result.endswith("".join(total[-1] for _, total in totals[::-1])), "the result is what the columns say"
    return sum(total != int(written) for total, written in totals)


def test_one_of_a_pair_is_correct_and_the_margin_counts_the_others_mistakes():
    pairs = preferences("train", 2000, seed=0, digits=[1, 2], mistakes=0.3)
    for pair in pairs:
        assert wrong_columns(pair["chosen"]) == 0
        assert pair["chosen"].endswith(f";{eval(pair['input'].rstrip('='))}")
        assert wrong_columns(pair["rejected"]) == pair["margin"] >= 1
    assert {pair["margin"] for pair in pairs} == {1, 2}
    assert {pair["margin"] for pair in preferences("train", 500, seed=0, digits=2)} == {1}
    assert pairs == preferences("train", 2000, seed=0, digits=[1, 2], mistakes=0.3)
    validation = {pair["input"] for pair in preferences("validation", 500, seed=0, digits=[1, 2])}
    assert not validation & {pair["input"] for pair in pairs}


def test_deterministic_and_disjoint_whatever_the_seeds():
    assert addition("train", 100, seed=1) == addition("train", 100, seed=1) != addition("train", 100, seed=2)
    train = {record["input"] for record in addition("train", 20_000, seed=1, digits=[1, 2])}
    validation = {record["input"] for record in addition("validation", 2_000, seed=7, digits=[1, 2])}
    assert len(validation) > 300
    assert not train & validation


def test_digits_are_as_requested():
    for record in addition("train", 300, seed=0, digits=3):
        assert re.fullmatch(r"\d{3}\+\d{3}=", record["input"])
    with pytest.raises(ValueError, match="at least 1"):
        addition("train", 1, seed=0, digits=0)
    with pytest.raises(ValueError, match="split 'test'"):
        addition("test", 1, seed=0)


def test_the_tokenizer_in_the_repository_equals_the_functions(tmp_path: Path):
    write_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (TINY / name).read_text() == (tmp_path / name).read_text()


def test_the_tiny_model_and_tokenizer_fit_together():
    tokenizer, model_config = AutoTokenizer.from_pretrained(TINY), AutoConfig.from_pretrained(TINY)
    tokens = tokenizer("47+85=").input_ids
    assert tokens[0] == tokenizer.bos_token_id == model_config.bos_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "47+85="
    assert tokenizer.unk_token_id not in tokenizer("7+5=12,4+8+1=13;132").input_ids
    assert len(tokenizer) == model_config.vocab_size
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (model_config.eos_token_id, model_config.pad_token_id)
    assert AutoModelForCausalLM.from_config(model_config).num_parameters() == 754_816
