"""Tasks that measure how likely a model finds texts: whole documents (kind perplexity), or the end of each (kind continuation).

    bits_per_byte      -log2 p of all texts / their bytes
    byte_perplexity    2 ** bits_per_byte
    word_perplexity    exp(-log p of all texts / their words)
    acc                kind continuation: the model would write the end greedily
    perplexity         kind continuation: exp(-mean over texts of log p(end))

These are lm-evaluation-harness's definitions. A quotient of sums is no mean over questions, so a question's value is its
linearization, which has the quotient as its mean and the quotient's error as its own. The interval of a perplexity is that of
the nats, with its ends mapped: it begins at 1 or above, and its upper end is farther away than its lower one.
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
    """A task of kind `perplexity`. A question's prompt is the text; `Question.task` may set "words" and "bytes" to count."""

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
        """Return bits_per_byte, byte_perplexity and word_perplexity by question."""
        return {
            "bits_per_byte": _linearize(answers, "bytes", lambda nats: (nats / LOG_2, 1 / LOG_2)),
            "byte_perplexity": _linearize(answers, "bytes", lambda nats: (math.exp(nats), math.exp(nats))),
            "word_perplexity": _linearize(answers, "words", lambda nats: (math.exp(nats), math.exp(nats))),
        }


class ContinuationTask(ChoicesTask):
    """A task of kind `continuation`. A question has one choice, the end of its text."""

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
    """Return the words that white space separates; an empty word before or after it counts too."""
    return _SPACES.split(text)


def _linearize(answers: Sequence[Answer], unit: str, of: Callable[[float], tuple[float, float]]) -> PerQuestion:
    """Return values whose mean is f(nats per unit over all answers); none if f overflows. of: nats per unit -> f, slope."""
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
