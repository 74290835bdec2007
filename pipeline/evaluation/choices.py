"""Tasks that a model answers by likelihood: its answer is the choice that is its most likely continuation of the prompt.

    acc         1 if the choice with the highest log-likelihood is right; of equal choices the first counts
    acc_norm    the same with the log-likelihood per character
    acc_bytes   the same with the log-likelihood per byte

These are lm-evaluation-harness's definitions. The length of a choice leaves out the space before it. Questions are asked in
units. The units depend on the data alone, so the numbers do not depend on the engines or on restarts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from typing_extensions import override

from pipeline.algorithms.evaluate import TaskConfig
from pipeline.config import Recipe
from pipeline.evaluation import task_data
from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.continuations import ContinuationEncoder, TokenPair
from pipeline.evaluation.engines import Engines
from pipeline.evaluation.prompts import PromptEncoder
from pipeline.evaluation.questions import Answer, PerQuestion, Question
from pipeline.evaluation.task_data import TaskData
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.types import Likelihood, LikelihoodRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNIT_TOKENS = 1 << 16
"""Maximum tokens of a unit of several questions; a context that choices share counts once. They fill several engine batches."""
ENCODED_TOGETHER = 1024  # questions


@dataclass(frozen=True, slots=True)
class ScoredQuestion:
    """A question and the tokens of the texts that are scored for it."""

    question: Question
    prompt: str  # the first text's context, to read
    texts: tuple[TokenPair, ...]

    @property
    def size(self) -> int:
        """Number of tokens. A context that several choices share counts once."""
        contexts = {id(text.context): len(text.context) for text in self.texts}
        return sum(contexts.values()) + sum(len(text.continuation) for text in self.texts)


class LikelihoodTask:
    """Base class of tasks by likelihood. It scores whole units of questions and keeps one answer per question."""

    def __init__(self, name: str, config: TaskConfig, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name, self.config = name, config
        self._longest = recipe.policy.generation.vllm_cfg.max_model_len
        read = task_data.read(name, config)
        self._units = list(_units(self._scored_questions(read, recipe, tokenizer)))
        read.dropped.check(sum(map(len, self._units)))
        texts = [text for unit in self._units for scored in unit for text in scored.texts]
        cut = sum(len(text) > self._longest for text in texts)
        self.dropped, self.warnings = read.dropped.count, read.dropped.warnings
        self.warnings += [self._too_long(cut, max(map(len, texts)), len(texts))] if cut else []

    def _too_long(self, cut: int, most: int, count: int) -> str:
        message = f"{cut} of {count} texts have more than {self._longest} tokens and lose their first tokens"
        return f"{message}. Try policy.max_total_sequence_length={most}"

    def _scored_questions(self, read: TaskData, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[ScoredQuestion]:
        """Yield the questions with the texts to score. Raises RecipeError for a question that cannot be scored."""
        raise NotImplementedError

    def _answer(self, scored: ScoredQuestion, likelihoods: Sequence[Likelihood]) -> Answer:
        """Return the answer of a question, from the likelihoods of its texts."""
        raise NotImplementedError

    def _bad_record(self, question: Question, problem: str) -> RecipeError:
        message = f"question {question.id}: {problem}"
        return RecipeError(Problem(f"evaluate.tasks.{self.name}.data", "bad-record", message))

    def ask(self, engines: Engines, answers: AnswerLog) -> None:
        """Score each unit that lacks an answer. A unit is always scored whole."""
        missing = [unit for unit in self._units if not all(answers.has(scored.question.id) for scored in unit)]
        for i, unit_likelihoods in engines.likelihoods(_Requests(missing, self._longest)):
            likelihoods = iter(unit_likelihoods)
            for scored in missing[i]:
                values = [next(likelihoods) for _ in scored.texts]
                if not answers.has(scored.question.id):
                    answers.add(self._answer(scored, values))


class ChoicesTask(LikelihoodTask):
    """A task of kind `choices`."""

    @override
    def _scored_questions(self, read: TaskData, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> Iterator[ScoredQuestion]:
        prompts = PromptEncoder(self.name, self.config, recipe.policy.tokenizer, tokenizer)
        encoder = ContinuationEncoder(tokenizer)
        between = self._delimiter()
        for start in range(0, len(read.questions), ENCODED_TOGETHER):
            questions, texts = [], []
            for question in read.questions[start : start + ENCODED_TOGETHER]:
                with read.dropped.dropping():
                    self._check(question)
                    contexts = _contexts(prompts, question, read.examples.get(question.id, ()))
                    texts.append([(text, between + choice) for text, choice in contexts])
                    questions.append(question)
            pairs = iter(encoder.pairs([text for of_question in texts for text in of_question]))
            for question, of_question in zip(questions, texts, strict=True):
                token_pairs = tuple(next(pairs) for _ in of_question)
                with read.dropped.dropping():
                    for i, pair in enumerate(token_pairs):
                        if not 0 < len(pair.continuation) < self._longest:
                            count, limit = len(pair.continuation), self._longest - 1
                            raise self._bad_record(question, f"choice {i} has {count} tokens; expected 1 to {limit}")
                    yield ScoredQuestion(question, of_question[0][0], token_pairs)

    def _delimiter(self) -> str:
        """Return the text between a prompt and its choice: "" after a chat template's beginning of a turn, else a space."""
        prefix = self.config.answer_prefix
        spaced = bool(prefix) and not prefix[-1].isspace() if self.config.apply_chat_template else True
        return " " if spaced else ""

    def _check(self, question: Question) -> None:
        if len(question.choices) < 2 or not set(question.correct) & set(range(len(question.choices))):
            message = f"has {len(question.choices)} choices, of which {list(question.correct)} are right"
            raise self._bad_record(question, f"{message}; expected at least two choices, at least one of them right")

    @override
    def _answer(self, scored: ScoredQuestion, likelihoods: Sequence[Likelihood]) -> Answer:
        question = scored.question
        sums = log_likelihoods(likelihoods)
        metrics, chosen = accuracies(sums, question), choices_by(sums, question)
        metric = self.config.metric or "acc"
        bad = [i for i, value in enumerate(sums) if not math.isfinite(value)]
        return Answer(
            question=question.id,
            sample=0,
            score=metrics.get(metric, metrics["acc"]),
            metrics=metrics,
            prompt=scored.prompt,
            text=question.choices[chosen.get(metric, chosen["acc"])],
            failure=f"the model gives choice {bad[0]} the log-likelihood {sums[bad[0]]}" if bad else "",
            group=question.group,
            details={
                "choices": list(question.choices),
                "correct": list(question.correct),
                "logprobs": sums,
                "greedy": [bool(likelihood.greedy.all()) for likelihood in likelihoods],
            },
        )

    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        """Return acc, acc_norm and acc_bytes -> question id -> [its value]. Leave out metrics that no answer has."""
        return {
            name: {answer.question: [answer.metrics[name]] for answer in answers if name in answer.metrics}
            for name in ("acc", "acc_norm", "acc_bytes")
            if any(name in answer.metrics for answer in answers)
        }


def log_likelihoods(likelihoods: Sequence[Likelihood]) -> list[float]:
    """Return the sum of log-probs of each text."""
    return [float(likelihood.logprobs.sum(dtype=np.float64)) for likelihood in likelihoods]


def accuracies(sums: Sequence[float], question: Question) -> dict[str, float]:
    """Return acc, acc_norm and acc_bytes -> 1 or 0, for one question. sums: the log-likelihood of each choice."""
    return {name: float(choice in question.correct) for name, choice in choices_by(sums, question).items()}


def choices_by(sums: Sequence[float], question: Question) -> dict[str, int]:
    """Return acc, acc_norm and acc_bytes -> the index of the best choice. sums: the log-likelihood of each choice.

    If the choices have prompts of their own (`Question.prompts`), there is only acc.
    """
    lengths = {"acc": [1] * len(sums)}
    if not question.prompts:
        lengths["acc_norm"] = [len(choice) for choice in question.choices]
        lengths["acc_bytes"] = [len(choice.encode(errors="surrogatepass")) for choice in question.choices]
    return {
        name: _highest([_per(value, length) for value, length in zip(sums, of, strict=True)]) for name, of in lengths.items()
    }


def _per(value: float, length: int) -> float:
    """Return value / length, or -inf for length 0, so that an empty choice is not the best."""
    return value / length if length else -math.inf


def _highest(values: Sequence[float]) -> int:
    """Return the index of the highest value, the first of equal values. As in numpy, NaN is higher than any number."""
    return int(np.argmax(values))


def _contexts(prompts: PromptEncoder, question: Question, examples: Sequence[Question]) -> list[tuple[str, str]]:
    """Return (the text that the model reads, the choice) for each choice."""
    if not question.prompts:
        text = prompts.text(question, examples)
        return [(text, choice) for choice in question.choices]
    variants = [replace(question, prompt=prompt) for prompt in question.prompts]
    return [(prompts.text(variant, examples), choice) for variant, choice in zip(variants, question.choices, strict=True)]


def _units(questions: Iterator[ScoredQuestion]) -> Iterator[list[ScoredQuestion]]:
    unit: list[ScoredQuestion] = []
    size = 0
    for scored in questions:
        if unit and size + scored.size > UNIT_TOKENS:
            yield unit
            unit, size = [], 0
        unit.append(scored)
        size += scored.size
    if unit:
        yield unit


class _Requests(Sequence[Sequence[LikelihoodRequest]]):
    """The requests of units, built on access. All requests at once would take much memory: each repeats its context."""

    def __init__(self, units: Sequence[Sequence[ScoredQuestion]], longest: int) -> None:
        self._units, self._longest = units, longest

    def __len__(self) -> int:
        return len(self._units)

    @overload
    def __getitem__(self, index: int) -> list[LikelihoodRequest]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[LikelihoodRequest]]: ...

    @override
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return [
            text.request(f"{scored.question.id}/{number}", self._longest)
            for scored in self._units[index]
            for number, text in enumerate(scored.texts)
        ]
