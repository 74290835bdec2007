"""Tasks whose answers a judge compares with a baseline's, such as AlpacaEval and Arena-Hard.

Each answer is compared twice, once as answer A and once as answer B, since judges prefer one of the two places. A win is 1, a
tie 0.5 and a loss 0, and the score is the mean of both orders. So a judge that always prefers A gives exactly 0.5. An answer
that keeps the judge from giving a verdict loses that comparison.

Not supported: verdicts weighted by their log-probs, Arena-Hard's five grades, its Bradley-Terry model of many opponents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from pipeline.environments.verdicts import read_preference
from pipeline.evaluation.judged import TEXTS, AskedVerdict, JudgedTask, per_question
from pipeline.evaluation.questions import Answer, PerQuestion, Question
from pipeline.evaluation.statistics import SHARE, Scale
from pipeline.evaluation.win_rate import length_controlled

ORDERS = {"model_first": "A", "baseline_first": "B"}
"""Order of the two answers -> the verdict with which the model wins."""


class ComparisonTask(JudgedTask):
    """A task of kind `comparison`. `Question.task` has the text `baseline`, and `difficulty` where the data have one.

    Metrics: `win_rate`; `length_controlled_win_rate`, see `win_rate.py`; `wins` and `losses`, the shares of answers that win or
    lose in both orders; `consistent`, the share of answers with the same result in both orders; `length`, in characters.
    """

    prompt_file: ClassVar[str] = "judge_comparison.txt"
    placeholders: ClassVar[tuple[str, ...]] = ("question", "answer_a", "answer_b")
    verdicts_per_answer: ClassVar[int] = 2
    scales: ClassVar[Mapping[str, Scale]] = {"length_controlled_win_rate": SHARE, "length": Scale(0.0)}

    @override
    def verdicts(self, question: Question, texts: Sequence[str]) -> list[AskedVerdict]:
        baseline = question.task["baseline"]
        prompts = {order: [self._render(question, order, text, baseline) for text in (texts[0], "")] for order in ORDERS}
        return [AskedVerdict(order, real, blank, read_preference) for order, (real, blank) in prompts.items()]

    def _render(self, question: Question, order: str, text: str, baseline: str) -> str:
        first, second = (text, baseline) if order == "model_first" else (baseline, text)
        return self._judge_prompt.fill({"question": asked_text(question), "answer_a": first, "answer_b": second})

    @override
    def grade(self, question: Question, texts: Sequence[str], verdicts: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        points = [_points(verdicts[order], wins) for order, wins in ORDERS.items()]
        metrics = dict(zip(ORDERS, points, strict=True))
        metrics["length_difference"] = float(len(texts[0]) - len(question.task["baseline"]))
        if question.task.get("difficulty") is not None:
            metrics["difficulty"] = float(question.task["difficulty"])
        return sum(points) / len(points), metrics

    @override
    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        judged = [answer for answer in answers if answer.score is not None]
        controlled: dict[str, list[float]] = {}
        for answer, value in zip(judged, _control_length(judged), strict=True):
            controlled.setdefault(answer.question, []).append(value)
        return {
            "win_rate": per_question(judged, lambda answer: answer.score),
            "length_controlled_win_rate": controlled,
            "wins": per_question(judged, lambda answer: float(answer.score == 1)),
            "losses": per_question(judged, lambda answer: float(answer.score == 0)),
            "consistent": per_question(judged, lambda answer: float(len({answer.metrics[order] for order in ORDERS}) == 1)),
            "length": per_question(judged, lambda answer: float(len(answer.details[TEXTS][0]))),
        }


def _points(verdict: str | None, wins: str) -> float:
    if verdict == "tie":
        return 0.5
    return float(verdict == wins)


def _control_length(judged: Sequence[Answer]) -> list[float]:
    scores = [answer.score or 0.0 for answer in judged]
    lengths = [answer.metrics["length_difference"] for answer in judged]
    rated = all("difficulty" in answer.metrics for answer in judged)
    difficulties = [answer.metrics["difficulty"] for answer in judged] if rated else None
    return length_controlled(scores, lengths, difficulties).tolist()


def asked_text(question: Question) -> str:
    """Return a question's prompt as one text. In a conversation of several messages, each message begins with its role."""
    if isinstance(question.prompt, str):
        return question.prompt
    if len(question.prompt) == 1:
        return question.prompt[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in question.prompt)
