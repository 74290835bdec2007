"""Scoring by likelihood against cases made by hand: choices, tokens of texts, windows, perplexity, and units."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.algorithms.evaluate import FORMATS, TaskConfig
from pipeline.evaluation import choices
from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.choices import ChoicesTask, ScoredQuestion, accuracies, choices_by
from pipeline.evaluation.continuations import ContinuationEncoder, rolling_windows
from pipeline.evaluation.perplexity import ContinuationTask, PerplexityTask
from pipeline.evaluation.questions import Answer, Question
from pipeline.evaluation.statistics import interval
from pipeline.recipe.problems import RecipeError
from pipeline.recipe.user_code import load
from pipeline.types import Likelihood
from tests.evaluation.likelihood_data import OneEngine, recipe, records, save_model, task_config, write_jsonl


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a model whose tokenizer begins each text with <s>."""
    return save_model(tmp_path_factory.mktemp("model"), "llama", 256)


class Fake:
    """A backend whose log-probs are -(token % 7), and greedy for even tokens."""

    def likelihoods(self, requests: Any) -> list[Likelihood]:
        scored = [request.tokens[request.first :] for request in requests]
        return [
            Likelihood(request.id, -(tokens % 7).astype(np.float32), tokens % 2 == 0)
            for request, tokens in zip(requests, scored, strict=True)
        ]


# ---- which choice is the highest --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sums", "texts", "correct", "acc", "norm", "per_byte"),
    [
        ([-1.0, -2.0], ["a", "b"], (0,), 1, 1, 1),
        ([-1.0, -2.0], ["a", "b"], (1,), 0, 0, 0),
        ([-2.0, -2.0], ["a", "b"], (0,), 1, 1, 1),  # of equal ones the first
        ([-2.0, -2.0], ["a", "b"], (1,), 0, 0, 0),
        ([-2.0, -3.0], ["ab", "abcd"], (1,), 0, 1, 1),  # -1 against -0.75 for each character
        ([-2.0, -3.0], ["ab", "abcd"], (0,), 1, 0, 0),
        ([-3.0, -3.9], ["abc", "日本語"], (1,), 0, 0, 1),  # 3 characters, 9 bytes
        ([-3.0, -3.9], ["abc", "日本語"], (0,), 1, 1, 0),
        ([-4.0, -4.5], ["🙂", "ab"], (0,), 1, 0, 1),  # 1 character, 4 bytes; -1 against -2.25 for each byte
        ([-1.0, -1.0, -0.5], ["x", "y", "zz"], (0, 2), 1, 1, 1),  # two are right
        ([-1.0, -5.0], ["ab ", "b"], (0,), 1, 1, 1),  # a space at the end counts
        ([-9.0, -1.0, -1.0], ["a", "b", "b"], (2,), 0, 0, 0),  # the same text twice: the first counts
        ([-math.inf, -700.0], ["a", "b"], (1,), 1, 1, 1),
        ([-0.0, -1e-9], ["a", "b"], (0,), 1, 1, 1),
        ([-1.0, -5.0], ["", "b"], (1,), 0, 1, 1),  # nothing has no character
    ],
)
def test_accuracies(sums, texts, correct, acc, norm, per_byte):
    question = Question("q", "p", choices=tuple(texts), correct=correct)
    assert accuracies(sums, question) == {"acc": acc, "acc_norm": norm, "acc_bytes": per_byte}


@pytest.mark.parametrize(("metric", "chosen"), [(None, "b"), ("acc", "b"), ("acc_norm", "long"), ("acc_bytes", "long")])
def test_the_text_is_the_choice_that_gives_the_score(metric, chosen):
    question = Question("q", "p", choices=("b", "long"), correct=(1,))
    assert choices_by([-1.0, -2.0], question) == {"acc": 0, "acc_norm": 1, "acc_bytes": 1}
    task = object.__new__(ChoicesTask)
    task.config = TaskConfig(metric=metric)
    found = [Likelihood("q", np.array([value]), np.array([True])) for value in (-1.0, -2.0)]
    answer = task._answer(ScoredQuestion(question, "p", ()), found)
    assert (answer.text, answer.score) == (chosen, float(chosen == "long"))


def test_choices_that_differ_in_their_prompts_have_one_length():
    question = Question("q", "p", choices=("end", "end"), prompts=("a", "bb"), correct=(1,))
    assert accuracies([-2.0, -1.0], question) == {"acc": 1.0}


# ---- tokens -----------------------------------------------------------------------------------------------------------------

TEXTS = [
    ("the river", " is old"),
    ("the river ", "is old"),  # the space goes to the continuation
    ("the river \n", "is old"),
    ("the  river", "  is  old "),
    ("river", "bank"),
    ("東京", " café🙂"),
    ("<s>the river", " is"),  # begins with the special token already
    ("a b", "<s> c"),
]


@pytest.mark.parametrize(("context", "continuation"), TEXTS)
def test_a_context_and_its_continuation_are_the_whole_text(folder, context, continuation):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (pair,) = ContinuationEncoder(tokenizer).pairs([(context, continuation)])
    kept = context.rstrip()
    assert pair.context[0] == tokenizer.bos_token_id and pair.context[1] != tokenizer.bos_token_id
    assert tokenizer.decode(pair.context[1:]) == kept.removeprefix("<s>")
    whole = tokenizer(kept + context[len(kept) :] + continuation, add_special_tokens=not context.startswith("<s>")).input_ids
    assert pair.continuation.tolist() == whole[len(pair.context) :] and len(pair.continuation)


def test_a_continuation_may_become_one_token_with_its_context(folder):
    (pair,) = ContinuationEncoder(AutoTokenizer.from_pretrained(folder)).pairs([("quick", "ly")])
    assert len(pair.continuation) == 0  # which a task refuses


def test_texts_without_a_context_follow_the_prefix(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = ContinuationEncoder(tokenizer)
    plain, special, blank = encoder.pairs([("", "the river"), ("", "<s>the river"), (" ", "the river")])
    assert plain.context.tolist() == special.context.tolist() == [tokenizer.bos_token_id] == [encoder.prefix]
    assert plain.continuation.tolist() == special.continuation.tolist() == tokenizer("the river").input_ids[1:]
    assert tokenizer.decode(blank.continuation) == " the river"


def test_the_end_token_is_the_prefix_of_models_without_a_first_one():
    words = Tokenizer(WordLevel({"</s>": 0, "a": 1, "b": 2}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder = ContinuationEncoder(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>"))
    (pair,) = encoder.pairs([("", "a b")])
    assert (pair.context.tolist(), pair.continuation.tolist()) == ([0], [1, 2])


def test_a_text_that_is_too_long_keeps_its_last_tokens(folder):
    encoder = ContinuationEncoder(AutoTokenizer.from_pretrained(folder))
    (pair,) = encoder.pairs([("the river is old " * 20, "green")])
    request = pair.request("q/0", 9)
    assert len(request.tokens) == 9 and request.tokens[request.first :].tolist() == pair.continuation.tolist()
    whole = pair.request("q/0", 1000)
    assert whole.tokens.tolist() == [*pair.context, *pair.continuation] and whole.first == len(pair.context)


@pytest.mark.parametrize(
    ("length", "longest", "expected"),
    [
        (3, 9, [([99], [0, 1, 2])]),
        (3, 4, [([99], [0, 1, 2])]),
        (4, 4, [([99], [0, 1, 2]), ([0, 1, 2], [3])]),
        (5, 4, [([99], [0, 1, 2]), ([1, 2], [3, 4])]),
        (6, 4, [([99], [0, 1, 2]), ([2], [3, 4, 5])]),
        (8, 4, [([99], [0, 1, 2]), ([2], [3, 4, 5]), ([4, 5], [6, 7])]),
        (0, 4, []),
    ],
)
def test_windows_score_each_token_once(length, longest, expected):
    windows = rolling_windows(np.arange(length, dtype=np.int32), 99, longest)
    assert [(window.context.tolist(), window.continuation.tolist()) for window in windows] == expected


# ---- perplexity -------------------------------------------------------------------------------------------------------------


def answer(question: str, **details: float) -> Answer:
    return Answer(question, 0, 0.0, details=details)


def mean(values) -> float:
    return interval(values.values()).value


def test_perplexity_is_of_all_texts_together():
    task = object.__new__(PerplexityTask)
    answers = [answer("a", logprob=-10.0, bytes=8, words=2), answer("b", logprob=-20.0, bytes=4, words=1)]
    found = {name: mean(values) for name, values in task.metrics(answers).items()}
    expected = {
        "bits_per_byte": 30 / 12 / math.log(2),
        "byte_perplexity": math.exp(30 / 12),
        "word_perplexity": math.exp(30 / 3),
    }
    assert found == pytest.approx(expected)
    # The interval is that of a quotient: it has no width where each text has the same perplexity, however long it is.
    even = [answer("a", logprob=-10.0, bytes=5, words=1), answer("b", logprob=-20.0, bytes=10, words=2)]
    bits = interval(task.metrics(even)["bits_per_byte"].values())
    assert bits.low == pytest.approx(bits.value) and bits.high == pytest.approx(bits.value)
    assert task.metrics([]) == {"bits_per_byte": {}, "byte_perplexity": {}, "word_perplexity": {}}


def test_perplexity_of_continuations_is_per_text():
    task = object.__new__(ContinuationTask)
    answers = [
        Answer("a", 0, 1.0, {"acc": 1.0}, details={"logprob": -1.0, "texts": 1}),
        Answer("b", 0, 0.0, {"acc": 0.0}, details={"logprob": -4.0, "texts": 1}),
    ]
    found = task.metrics(answers)
    assert mean(found["acc"]) == 0.5 and mean(found["perplexity"]) == pytest.approx(math.exp(2.5))


# ---- tasks ------------------------------------------------------------------------------------------------------------------


def made(folder: Path, path: Path, form: str, rows, longest: int = 256, **settings) -> Any:
    config = task_config(form, write_jsonl(path / f"{form}.jsonl", rows), **settings)
    kind = {"continuation": ContinuationTask, "perplexity": PerplexityTask}.get(config.kind, ChoicesTask)
    return kind(form, config, recipe(folder, "transformers", longest), AutoTokenizer.from_pretrained(folder))


def ask(task, folder: Path) -> tuple[AnswerLog, int]:
    """Return the answers, and the number of units asked."""
    log, engines = AnswerLog(folder, task.name), OneEngine(Fake())  # pyright: ignore[reportArgumentType]  # it only scores
    task.ask(engines, log)
    return log, engines.asked


def test_a_restart_asks_only_units_that_lack_an_answer(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "UNIT_TOKENS", 300)
    task = made(folder, tmp_path, "hellaswag", records("hellaswag", 20))
    assert len(task._units) > 3 and sum(map(len, task._units)) == 20
    whole, asked = ask(task, tmp_path / "whole")
    assert asked == len(task._units) and ask(task, tmp_path / "whole")[1] == 0
    lines = whole.path.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut" / "answers" / whole.path.name
    cut.parent.mkdir(parents=True)
    cut.write_text("".join(lines[:4]) + lines[4][:20])  # killed while it wrote
    again, asked = ask(task, tmp_path / "cut")
    assert again.all() == whole.all() and 0 < asked <= len(task._units)
    assert len(cut.read_text().splitlines()) == 20  # nothing twice


def test_answers_tell_what_was_scored(folder, tmp_path):
    rows = [{"goal": "g", "sol1": "the river", "sol2": "stone", "label": 1}]
    task = made(folder, tmp_path, "piqa", rows)
    log, _ = ask(task, tmp_path)
    (found,) = log.all()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    before = len(tokenizer("Question: g\nAnswer:").input_ids)
    ends = [np.array(tokenizer(f"Question: g\nAnswer: {text}").input_ids[before:]) for text in ("the river", "stone")]
    assert found.details["logprobs"] == [float(-(end % 7).sum()) for end in ends]
    assert found.details["greedy"] == [bool((end % 2 == 0).all()) for end in ends]
    assert found.prompt == "Question: g\nAnswer:" and found.details["choices"] == ["the river", "stone"]
    assert found.score == found.metrics["acc"] and task.metrics([found])["acc"] == {found.question: [found.score]}


def test_texts_that_are_too_long_are_counted_or_refused(folder, tmp_path):
    rows = records("boolq", 6)
    long = {"passage": "river " * 150, "question": "is it", "label": 0}
    task = made(folder, tmp_path, "boolq", [*rows, long], longest=120)
    (warning,) = task.warnings
    assert warning.startswith("2 of 14 texts have more than 120 tokens and lose their first tokens. Try policy.max_total")
    assert made(folder, tmp_path, "boolq", rows).warnings == []
    with pytest.raises(RecipeError, match=r"choice 1 has \d+ tokens; expected 1 to 119"):
        bad = {"goal": "g", "sol1": "a", "sol2": "river " * 130, "label": 0}
        made(folder, tmp_path, "piqa", [bad], longest=120)


def test_a_chat_template_needs_no_space_before_a_choice():
    task = object.__new__(ChoicesTask)
    cases = [
        (False, None, " "),
        (True, None, ""),
        (True, "The answer is", " "),
        (True, "The answer is ", ""),
        (False, "A", " "),
    ]
    for chat, prefix, expected in cases:
        task.config = TaskConfig(apply_chat_template=chat, answer_prefix=prefix)
        assert task._delimiter() == expected
    task = object.__new__(ContinuationTask)
    task.config = TaskConfig(apply_chat_template=True)
    assert task._delimiter() == " "


# ---- formats ----------------------------------------------------------------------------------------------------------------


def question(form: str, record: dict[str, Any]) -> Question:
    made = load(FORMATS[form])
    return made(made.Arguments()).question(record, 0)


def test_formats():
    found = question(
        "hellaswag",
        {
            "activity_label": "Roof",
            "ctx_a": "A man [header] sits. [title] He",
            "ctx_b": "STARTS  to",
            "endings": [" pulls [step] it. ", "b"],
            "label": "1",
        },
    )
    assert found.prompt == "Roof: A man sits.. He Starts to" and found.choices == ("pulls it.", "b") and found.correct == (1,)
    found = question("winogrande", {"sentence": "Ian ate _ menu_s.", "option1": "Dennis's", "option2": "his", "answer": "2"})
    assert found.prompts == ("Ian ate Dennis's", "Ian ate his") and found.prompt == "Ian ate his"
    assert found.choices == ("menu_s.",) * 2 and found.target == " menu_s." and found.correct == (1,)
    labels = {"text": ["x", "y", "z"], "label": ["1", "2", "3"]}
    found = question("arc", {"question": "Why?", "choices": labels, "answerKey": "3"})
    assert (found.prompt, found.choices, found.correct) == ("Question: Why?\nAnswer:", ("x", "y", "z"), (2,))
    found = question("mmlu", {"question": " Q? ", "subject": "high_school_physics", "choices": list("wxyz"), "answer": 3})
    assert found.prompt == "Q?\nA. w\nB. x\nC. y\nD. z\nAnswer:" and (found.target, found.group) == (
        " D",
        "high_school_physics",
    )
    assert found.description == "The following are multiple choice questions (with answers) about high school physics.\n\n"
    found = question("lambada", {"text": "she saw the dog"})
    assert (found.prompt, found.choices) == ("she saw the", ("dog",))
    assert question("lambada", {"text": "dog"}).prompt == ""


@pytest.mark.parametrize(
    ("form", "record", "message"),
    [
        ("winogrande", {"sentence": "no blank", "option1": "a", "option2": "b", "answer": "1"}, "expected a blank"),
        ("winogrande", {"sentence": "a _ b", "option1": "a", "option2": "b", "answer": ""}, "answer ''; expected a blank"),
        (
            "piqa",
            {"goal": "g", "sol1": "a", "sol2": "b", "label": -1},
            "got -1 as the index of the right choice; expected 0 to 1",
        ),
        ("arc", {"question": "q", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "B"}, "'B'; expected one of A"),
        ("mmlu", {"question": "q", "subject": "s", "choices": ["a"], "answer": 0}, "has 1 choices; expected 4"),
    ],
)
def test_records_that_no_format_reads(form, record, message):
    with pytest.raises(ValueError, match=message):
        question(form, record)
