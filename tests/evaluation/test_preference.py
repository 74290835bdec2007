"""Scores of reward models: credit by hand, weights of sections, and the engines that compute them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.evaluation.engines import RewardEngines
from pipeline.evaluation.formats.reward_benchmarks import RewardBench
from pipeline.evaluation.preference import SECTIONS, PreferenceTask, _ConversationEncoder, credit
from pipeline.evaluation.questions import Answer
from tests.fake_group import FakeGroup
from tests.problems import refused
from tests.roles.judges import CHATML, write_tokenizer

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("chosen", "rejected", "right"),
    [
        ([1.0], [0.0], 1.0),
        ([0.0], [1.0], 0.0),
        ([1.0], [1.0], 0.0),  # equal scores of a pair
        ([-2.0], [-3.0], 1.0),
        ([1e-9], [0.0], 1.0),
        ([1.0], [0.0, 0.5, 0.9], 1.0),
        ([0.7], [0.0, 0.5, 0.9], 0.0),
        ([0.9], [0.0, 0.5, 0.9], 1 / 2),
        ([0.9], [0.9, 0.5, 0.9], 1 / 3),
        ([0.9], [0.9, 0.9, 0.9], 1 / 4),
        ([0.5], [0.5, 0.9, 0.9], 0.0),
        ([1.0, 2.0], [0.0], 1.0),
        ([1.0, 2.0], [1.5], 0.0),
        ([1.0, 2.0], [1.0], 0.0),
        ([1.0, 2.0, 3.0], [0.9, 0.1], 1.0),
        ([1.0, 2.0, 3.0], [2.5, 0.1], 0.0),
        ([NAN], [0.0], 0.0),
        ([1.0], [NAN], 0.0),
        ([INF], [0.0], 0.0),
        ([1.0], [-INF], 0.0),
        ([NAN, 1.0], [0.0], 0.0),
        ([1.0], [0.0, NAN], 0.0),
    ],
)
def test_credit(chosen, rejected, right):
    assert credit(chosen, rejected) == right


def answers(accuracies: dict[str, tuple[int, int]]) -> list[Answer]:
    """Return answers of each subset: (right, all)."""
    return [
        Answer(f"{subset}{i}", 0, float(i < right), group=subset)
        for subset, (right, count) in accuracies.items()
        for i in range(count)
    ]


def means(given: list[Answer]) -> dict[str, float]:
    metrics = PreferenceTask.metrics(SimpleNamespace(), given)
    return {name: float(np.mean([np.mean(each) for each in values.values()])) for name, values in metrics.items()}


def test_sections_weigh_subsets_by_questions_and_math_as_much_as_code():
    given = answers(
        {"alpacaeval-easy": (8, 10), "mt-bench-med": (1, 5), "math-prm": (2, 4), "hep-cpp": (3, 3), "hep-go": (0, 6)}
    )
    assert means(given) == pytest.approx(
        {"chat": 9 / 15, "reasoning": (2 / 4 * 9 + 3) / 18, "score": (9 / 15 + (4.5 + 3) / 18) / 2, "accuracy": 14 / 28}
    )


def test_all_sections():
    accuracies = {subset: (i % 4, 4) for i, subset in enumerate(sum(SECTIONS.values(), ()))}
    found = means(answers(accuracies))
    assert found["score"] == pytest.approx(np.mean([found[section] for section in SECTIONS]))
    assert found["chat"] == pytest.approx(np.mean([accuracies[subset][0] / 4 for subset in SECTIONS["chat"]]))


def test_other_subsets_weigh_the_same():
    assert means(answers({"Focus": (1, 2), "Math": (10, 10)})) == pytest.approx({"score": 0.75, "accuracy": 11 / 12})
    assert means(answers({"": (1, 4)})) == {"score": 0.25, "accuracy": 0.25}
    assert PreferenceTask.metrics(SimpleNamespace(), []) == {"score": {}, "accuracy": {}}


def test_records():
    form = RewardBench(None)
    question = form.question({"prompt": "p", "chosen": "c", "rejected": "r", "subset": "hep-go", "id": 7}, 0)
    assert (question.id, question.prompt, question.group) == ("7", "p", "hep-go")
    assert question.task == {"chosen": ["c"], "rejected": ["r"]}
    chat = [{"role": "user", "content": "p"}]
    assert form.question({"prompt": chat, "chosen": ["c"], "rejected": ["r", "s"]}, 0).task["rejected"] == ["r", "s"]
    for wrong in ({"prompt": "p", "chosen": [], "rejected": "r"}, {"prompt": "p", "chosen": [1], "rejected": "r"}):
        with pytest.raises(ValueError, match="'chosen' is"):
            form.question(wrong, 0)


@pytest.mark.parametrize(("chat", "text"), [(True, "<u>ab!\n<a>cd!"), (False, "abcd!")])
def test_a_conversation_ends_with_its_turn(chat, text, tmp_path):
    tokenizer = write_tokenizer(tmp_path, chat_template=CHATML)
    encoder = _ConversationEncoder("x", SimpleNamespace(apply_chat_template=chat, system_prompt=None), tokenizer, None)
    question = RewardBench(None).question({"prompt": "ab", "chosen": "cd", "rejected": "e"}, 0)
    assert tokenizer.decode(encoder.encode(question, "cd")) == text


def test_a_turn_without_text_that_the_template_cannot_show_is_a_bad_record(tmp_path):
    tokenizer = write_tokenizer(tmp_path, chat_template=CHATML)
    call = {"type": "function", "function": {"name": "b", "arguments": {}}}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    question = RewardBench(None).question({"prompt": said, "chosen": "cd", "rejected": "e"}, 0)
    config = SimpleNamespace(apply_chat_template=True, system_prompt=None)
    with refused(("evaluate.tasks.x.data", "bad-record")):
        _ConversationEncoder("x", config, tokenizer, None).encode(question, "cd")


class Engine(FakeGroup):
    """Scores a sequence by its first token, in as many ranks as it has; `includes_caller`: at once."""

    def __init__(self, ranks: int, own: bool) -> None:
        self.ranks, self.includes_caller, self.units = ranks, own, 0

    def score(self, parts):
        self.units += 1
        assert len(parts) == self.ranks
        replies = [[float(tokens[0]) for members in work.microbatches for tokens in members] for work in parts]
        return SimpleNamespace(done=True, result=lambda: replies)

    def receive_replies(self, block: bool) -> bool:
        return False


@pytest.mark.parametrize(("ranks", "engines"), [(1, 1), (2, 1), (1, 3), (4, 2)])
def test_units_come_back_in_their_order(ranks, engines):
    packing = SimpleNamespace(enabled=True, logprob_mb_tokens=20)
    groups = [Engine(ranks, own=not i) for i in range(engines)]
    scoring = RewardEngines(groups, ranks, SimpleNamespace(sequence_packing=packing))
    units = [[np.full(1 + (i * j) % 7, 100 * i + j, np.int32) for j in range(5)] for i in range(9)]
    found = dict(scoring.score(units))
    assert found == {i: [100.0 * i + j for j in range(5)] for i in range(9)}
    assert sum(group.units for group in groups) == 9 and all(group.units for group in groups)
