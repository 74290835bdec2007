"""Records of AlpacaEval, Arena-Hard, MT-Bench and of requests, and files of a baseline's answers."""

import json

import pytest

from pipeline.evaluation.formats.chat_benchmarks import AlpacaEval, ArenaHard, BaselineArguments, MTBench
from pipeline.evaluation.formats.refusal_requests import Requests, RequestsArguments


def lines(path, *records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_alpaca_eval(tmp_path):
    record = {"instruction": "Why?", "output": "So.", "generator": "g", "dataset": "koala", "hard": 0.5}
    question = AlpacaEval(BaselineArguments(difficulty_key="hard")).question(record, 0)
    assert (question.prompt, question.group, question.task) == ("Why?", "koala", {"baseline": "So.", "difficulty": 0.5})
    other = lines(tmp_path / "other.jsonl", {"instruction": "Why?", "output": "Because.", "generator": "h"})
    assert AlpacaEval(BaselineArguments(other)).question(record, 0).task == {"baseline": "Because.", "difficulty": None}


@pytest.mark.parametrize(
    "answer",
    [
        {"uid": "q1", "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": {"answer": "yes"}}]},
        {"question_id": "q1", "choices": [{"index": 0, "turns": [{"content": "yes", "token_len": 1}]}]},
        {"question": "q1", "sample": 0, "text": "<think>x</think>yes", "details": {"texts": ["yes"]}},
        {"question": "q1", "sample": 0, "text": "yes", "details": {}},
    ],
)
@pytest.mark.parametrize(
    "record",
    [
        {"uid": "q1", "category": "hard_prompt", "prompt": "Hi"},
        {"question_id": "q1", "cluster": "hard_prompt", "turns": [{"content": "Hi"}]},
    ],
)
def test_arena_hard(record, answer, tmp_path):
    question = ArenaHard(BaselineArguments(lines(tmp_path / "base.jsonl", answer))).question(record, 0)
    assert (question.id, question.prompt, question.group, question.task["baseline"]) == ("q1", "Hi", "hard_prompt", "yes")


def test_a_baseline_without_the_answer_is_named(tmp_path):
    record = {"uid": "q2", "prompt": "Hi"}
    for path, message in (
        (lines(tmp_path / "a.jsonl", {"uid": "q1", "messages": [{"content": "yes"}]}), "has no answer to question q2"),
        (str(tmp_path / "none.jsonl"), "No such file"),
        (lines(tmp_path / "b.jsonl", {"x": 1}), "cannot read a line's question and answer"),
        (None, "baseline_file is null"),
    ):
        with pytest.raises(ValueError, match=message):
            ArenaHard(BaselineArguments(path)).question(record, 0)


@pytest.mark.parametrize(("name", "turns"), [("question_id", "turns"), ("prompt_id", "prompt")])
def test_mt_bench(name, turns):
    record = {name: 81, "category": "math", turns: ["a", "b"], "reference": ["1", None]}
    question = MTBench(None).question(record, 0)
    assert (question.id, question.prompt, question.group) == ("81", "a", "math")
    assert question.task == {"turns": ["a", "b"], "references": ["1", ""]}
    for wrong in ({turns: "a"}, {turns: []}, {turns: ["a", ""]}, {"reference": ["1", "2", "3"]}, {"reference": "1"}):
        with pytest.raises(ValueError, match="expected a list"):
            MTBench(None).question({**record, **wrong}, 0)


def test_requests():
    xstest = Requests(RequestsArguments(group_key="type"))
    assert xstest.question({"prompt": "p", "label": "safe", "type": "homonyms"}, 0).task == {"harmful": False}
    assert xstest.question({"prompt": "p", "label": "unsafe", "type": "homonyms"}, 0).task == {"harmful": True}
    with pytest.raises(ValueError, match="'label' is maybe"):
        xstest.question({"prompt": "p", "label": "maybe", "type": "homonyms"}, 0)
    strong = Requests(RequestsArguments(prompt_key="forbidden_prompt", label_key=None))
    assert strong.question({"forbidden_prompt": "p", "category": "c"}, 0).task == {"harmful": True}
    assert strong.required == ("forbidden_prompt",) and xstest.required == ("prompt", "label", "type")
