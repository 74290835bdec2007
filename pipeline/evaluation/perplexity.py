"""Tasks that measure the likelihood of texts: of whole documents (kind perplexity), or of a text's end (kind continuation).

    bits_per_byte      -log2 p of all texts / their bytes
    byte_perplexity    2 ** bits_per_byte
    word_perplexity    exp(-log p of all texts / their words)
    acc                kind continuation: 1 if greedy sampling would write the end
    perplexity         kind continuation: exp(-mean over texts of log p(end))

These are lm-evaluation-harness's definitions. A quotient of sums is not a mean over questions. So the values of the questions
are a linearization of the quotient: their mean is the quotient, and the standard error of their mean is the quotient's. The
interval of a perplexity is the interval of the nats with exp applied to its ends. So it begins at 1 or above, and its upper end
is farther from the value than its lower end.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from typing_extensions import override

from pipeline.config import Recipe
from pipeline.evaluation.choices import ChoicesTask, LikelihoodTask, ScoredQuestion, log_likelihoods
from pipeline.evaluation.continuations import ContinuationEncoder, rolling_windows
from pipeline.evaluation.questions import Answer, PerQuestion, Question
from pipeline.evaluation.statistics import Scale
from pipeline.evaluation.task_data import TaskData
from pipeline.types import Likelihood

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG_2 = math.log(2)
PERPLEXITY = Scale(1.0, exponential=True)
_SPACES = re.compile(r"\s+")


class PerplexityTask(LikelihoodTask):
    """A task of kind `perplexity`. A question's prompt is the text.

    `Question.task` may have "words" and "bytes", the numbers to use in place of the text's own.
    """

    scales: ClassVar[Mapping[str, Scale]] = {
        "bits_per_byte": Scale(0.0),
        "byte_perplexity": PERPLEXITY,
        "word_perplexity": PERPLEXITY,
    }

    @override
    def _scored_questions(self, read: TaskData, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[ScoredQuestion]:
        encoder = ContinuationEncoder(tokenizer)
        for question in read.questions:
            with read.dropped.dropping():
                if not isinstance(question.prompt, str) or not question.prompt:
                    raise self._bad_record(question, "has no text to score")
                (tokens,) = encoder.encode([question.prompt])
                yield ScoredQuestion(question, question.prompt, tuple(rolling_windows(tokens, encoder.prefix, self._longest)))

    @override
    def _answer(self, scored: ScoredQuestion, likelihoods: Sequence[Likelihood]) -> Answer:
        question, text = scored.question, scored.prompt
        total = math.fsum(log_likelihoods(likelihoods))
        count = question.task.get("bytes", len(text.encode(errors="surrogatepass")))
        return Answer(
            question=question.id,
            sample=0,
            score=-total / LOG_2 / count,
            prompt=text,
            group=question.group,
            details={"logprob": total, "bytes": count, "words": question.task.get("words", len(words(text)))},
        )

    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        """Return bits_per_byte, byte_perplexity and word_perplexity -> question id -> [its value]."""
        return {
            "bits_per_byte": _linearize(answers, "bytes", lambda nats: (nats / LOG_2, 1 / LOG_2)),
            "byte_perplexity": _linearize(answers, "bytes", lambda nats: (math.exp(nats), math.exp(nats))),
            "word_perplexity": _linearize(answers, "words", lambda nats: (math.exp(nats), math.exp(nats))),
        }


class ContinuationTask(ChoicesTask):
    """A task of kind `continuation`. A question has a single choice: the end of its text."""

    scales: ClassVar[Mapping[str, Scale]] = {"perplexity": PERPLEXITY}

    @override
    def _delimiter(self) -> str:
        return " "

    @override
    def _check(self, question: Question) -> None:
        if len(question.choices) != 1:
            raise self._bad_record(question, f"has {len(question.choices)} choices; expected 1, the end of the text")

    @override
    def _answer(self, scored: ScoredQuestion, likelihoods: Sequence[Likelihood]) -> Answer:
        question = scored.question
        (end,) = likelihoods
        greedy = float(end.greedy.all())
        return Answer(
            question=question.id,
            sample=0,
            score=greedy,
            metrics={"acc": greedy},
            prompt=scored.prompt,
            text=question.choices[0],
            group=question.group,
            details={"logprob": log_likelihoods(likelihoods)[0], "texts": 1},
        )

    @override
    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        return {
            "acc": {answer.question: [answer.metrics["acc"]] for answer in answers},
            "perplexity": _linearize(answers, "texts", lambda nats: (math.exp(nats), math.exp(nats))),
        }


def words(text: str) -> list[str]:
    """Split a text at white space. White space at an end of the text gives an empty word there, which counts too."""
    return _SPACES.split(text)


def _linearize(answers: Sequence[Answer], unit: str, of: Callable[[float], tuple[float, float]]) -> PerQuestion:
    """Return question id -> [value], where the mean of the values is f(nats per unit of all answers); {} if f overflows.

    unit: key of `Answer.details` with an answer's number of units. of: a function nats per unit -> (f, derivative of f).
    """
    if not answers:
        return {}
    nats = np.array([-answer.details["logprob"] for answer in answers])
    counts = np.array([answer.details[unit] for answer in answers], np.float64)
    ratio = math.fsum(nats) / math.fsum(counts)
    try:
        value, slope = of(ratio)
    except OverflowError:  # a perplexity above the largest float
        return {}
    values = value + slope * (nats - ratio * counts) / counts.mean()
    return {answer.question: [float(number)] for answer, number in zip(answers, values, strict=True)}
