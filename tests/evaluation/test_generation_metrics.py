"""maj@k, and the metrics of a generation task."""

import pytest

from pipeline.algorithms.evaluate import TaskConfig
from pipeline.evaluation.questions import Answer
from pipeline.evaluation.sampled import GenerationTask, majority


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["4", "4", "5"], "4", 1.0),
        (["5", "5", "4"], "4", 0.0),
        (["5", "4"], "4", 0.5),  # a tie
        (["5", "6", "4", "4", "5"], "4", 0.5),
        (["", "", "", "4"], "4", 1.0),  # no answer has no vote
        (["", ""], "4", 0.0),
        ([], "4", 0.0),
        (["5", "6", "7"], "4", 0.0),
    ],
)
def test_majority(answers: list[str], right: str, expected: float):
    assert majority([float(answer == right) for answer in answers], answers) == expected


def test_right_answers_in_other_words_are_one_answer():
    assert majority([1.0, 1.0, 0.0, 0.0, 0.0], ["0.5", "1/2", "3", "3", "4"]) == 0.5


def test_metrics_of_a_task():
    task = object.__new__(GenerationTask)
    task.config = TaskConfig(num_samples=3, pass_at=[1, 3], majority=True)
    answers = [
        Answer("q", 0, 1.0, {"accuracy": 1.0, "unparsed": 0.0}, details={"extracted": "4"}),
        Answer("q", 1, 0.0, {}, failure="it broke its environment"),
        Answer("q", 2, 0.0, {"accuracy": 0.0, "unparsed": 1.0}),
        Answer("r", 0, 0.0, {"accuracy": 0.0, "unparsed": 0.0}, details={"extracted": "5"}),
        Answer("r", 1, None, failure="its judge was down"),
    ]
    assert task.metrics(answers) == {
        "score": {"q": [1.0, 0.0, 0.0], "r": [0.0]},
        "accuracy": {"q": [1.0, 0.0, 0.0], "r": [0.0]},
        "unparsed": {"q": [0.0, 0.0, 1.0], "r": [0.0]},
        "pass@1": {"q": [pytest.approx(1 / 3)], "r": [0.0]},
        "pass@3": {"q": [1.0]},
        "maj@3": {"q": [1.0], "r": [0.0]},
    }
