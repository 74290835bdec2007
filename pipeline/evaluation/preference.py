"""Tasks that test whether a reward model scores chosen answers above rejected ones, as in RewardBench.

    a pair              right if the chosen answer's score is higher; equal scores are wrong
    best of n           one chosen answer and several rejected answers: right if the chosen answer's score is the highest; 1/k
                        if k answers share the highest score and the chosen one is among them
    several chosen      right if each chosen answer's score is higher than each rejected answer's

RewardBench's score is the mean of its sections. In a section, the weight of a subset is its number of questions, except in
`reasoning`, where the math subset weighs as much as all code subsets together. Subsets of other data, such as RewardBench 2,
have equal weights.

A text is scored at the end of its answer's turn, as in training. A text that is too long loses its first tokens.
Not supported: the margins of RewardBench 2's subset Ties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipeline.algorithms.evaluate import TaskConfig
from pipeline.config import Recipe, evaluated_reward_model
from pipeline.data.chat import load_tokenizer
from pipeline.data.plain_text import PlainText
from pipeline.data.rendering import ChatTemplate
from pipeline.data.special_tokens import SpecialTokenEscaper
from pipeline.data.templates import check_template
from pipeline.evaluation import task_data
from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.engines import Engines
from pipeline.evaluation.judged import per_question
from pipeline.evaluation.questions import Answer, PerQuestion, Question
from pipeline.evaluation.statistics import SHARE, Scale
from pipeline.evaluation.task_data import TaskData
from pipeline.recipe.problems import Problem, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNIT = 32
"""Number of questions that an engine scores together. It is fixed, so that the scores depend on the data alone."""
SECTIONS = {
    "chat": ("alpacaeval-easy", "alpacaeval-length", "alpacaeval-hard", "mt-bench-easy", "mt-bench-med"),
    "chat_hard": (
        *("mt-bench-hard", "llmbar-natural", "llmbar-adver-neighbor", "llmbar-adver-GPTInst", "llmbar-adver-GPTOut"),
        "llmbar-adver-manual",
    ),
    "safety": ("refusals-dangerous", "refusals-offensive", "xstest-should-refuse", "xstest-should-respond", "donotanswer"),
    "reasoning": ("math-prm", "hep-cpp", "hep-go", "hep-java", "hep-js", "hep-python", "hep-rust"),
}
"""RewardBench's section -> its subsets."""
MATH = "math-prm"
"""The subset that weighs as much as all other subsets of its section together."""
SECTION_OF = {subset: section for section, subsets in SECTIONS.items() for subset in subsets}


class PreferenceTask:
    """A task of kind `preference`. `Question.task` has `chosen` and `rejected`, lists of texts; `group` is the subset.

    Metrics: `score`, the mean of the sections if all subsets are RewardBench's, else the mean of the subsets; `accuracy`, the
    mean of the questions; for RewardBench also each section by its name.
    """

    scales: ClassVar[Mapping[str, Scale]] = dict.fromkeys(("score", *SECTIONS), SHARE)

    def __init__(self, name: str, config: TaskConfig, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name, self.config = name, config
        model = evaluated_reward_model(recipe)
        read = task_data.read(name, config)
        self._encoder = _ConversationEncoder(
            name, config, load_tokenizer(model.tokenizer), model.tokenizer.chat_template_kwargs
        )
        self._longest = model.max_total_sequence_length
        self._questions = self._encodable(read)
        self.dropped, self.warnings = read.dropped.count, read.dropped.warnings

    def _encodable(self, read: TaskData) -> Sequence[Question]:
        """Return the questions that can be scored if the task drops bad ones.

        Otherwise return all questions; scoring a bad question then raises RecipeError.
        """
        if not read.dropped.drops:
            return read.questions
        usable = []
        for question in read.questions:
            with read.dropped.dropping():
                self._sequences(question)
                usable.append(question)
        read.dropped.check(len(usable))
        return usable

    def ask(self, engines: Engines, answers: AnswerLog) -> None:
        """Score the units that lack an answer."""
        assert engines.rewards  # the loop skips the task without a reward model
        units = [self._questions[i : i + UNIT] for i in range(0, len(self._questions), UNIT)]
        missing = [unit for unit in units if not all(answers.has(question.id) for question in unit)]
        encoded = [[self._sequences(question) for question in unit] for unit in missing]
        flat = [[tokens[-self._longest :] for texts in unit for tokens in texts] for unit in encoded]
        for number, scores in engines.rewards.score(flat):
            stream = iter(scores)
            for question, texts in zip(missing[number], encoded[number], strict=True):
                question_scores = [next(stream) for _ in texts]
                if not answers.has(question.id):
                    answers.add(_answer(question, question_scores, any(len(tokens) > self._longest for tokens in texts)))

    def _sequences(self, question: Question) -> list[np.ndarray]:
        return [self._encoder.encode(question, text) for text in (*question.task["chosen"], *question.task["rejected"])]

    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        """Return `score`, `accuracy` and the sections -> question id -> values.

        The values are weighted so that a metric is their mean over questions.
        """
        accuracy = per_question(answers, lambda answer: answer.score)
        subsets = {answer.question: answer.group for answer in answers if answer.question in accuracy}
        if not subsets or not set(subsets.values()) <= set(SECTION_OF):
            return {"score": _weight_values(accuracy, subsets, lambda subset, sizes: 1.0), "accuracy": accuracy}
        sections: dict[str, PerQuestion] = {}
        for section in SECTIONS:
            members = {question: subset for question, subset in subsets.items() if SECTION_OF[subset] == section}
            if members:
                sections[section] = _weight_values({question: accuracy[question] for question in members}, members, _weight)
        total = len(accuracy)
        score = {
            question: [value * total / (len(sections) * len(values)) for value in scores]
            for values in sections.values()
            for question, scores in values.items()
        }
        return {"score": score, "accuracy": accuracy, **sections}


def _weight(subset: str, sizes: Mapping[str, int]) -> float:
    """Return the weight of a subset in its section: its number of questions; for math, that of all other subsets together.

    sizes: subset -> its number of questions.
    """
    total = sum(size for name, size in sizes.items() if name != MATH)
    return total if subset == MATH and total else sizes[subset]


def _weight_values(values: PerQuestion, subsets: Mapping[str, str], weight: Any) -> dict[str, list[float]]:
    """Return question id -> values whose mean over questions is the weighted mean of the subsets.

    subsets: question id -> its subset. weight: a function (subset, sizes) -> the weight of the subset.
    """
    sizes: dict[str, int] = {}
    for question in values:
        sizes[subsets[question]] = sizes.get(subsets[question], 0) + 1
    weights = {subset: weight(subset, sizes) for subset in sizes}
    factor = len(values) / sum(weights.values()) if weights else 0.0
    return {
        question: [value * factor * weights[subsets[question]] / sizes[subsets[question]] for value in scores]
        for question, scores in values.items()
    }


def credit(chosen: Sequence[float], rejected: Sequence[float]) -> float:
    """Return 1 if the scores rank the chosen answers above the rejected ones, else 0; 1/k for ties in best of n (see above)."""
    if not all(map(math.isfinite, (*chosen, *rejected))):
        return 0.0
    if len(chosen) > 1 or len(rejected) == 1:
        return float(min(chosen) > max(rejected))
    best = max(*chosen, *rejected)
    return 0.0 if chosen[0] < best else 1 / (1 + sum(score == best for score in rejected))


def _answer(question: Question, scores: Sequence[float], cut: bool) -> Answer:
    chosen, rejected = scores[: len(question.task["chosen"])], scores[len(question.task["chosen"]) :]
    finite = all(map(math.isfinite, scores))
    prompt = question.prompt if isinstance(question.prompt, str) else question.prompt[-1]["content"]
    details = {"chosen": list(chosen), "rejected": list(rejected)} if finite else {}
    return Answer(
        question.id,
        0,
        credit(chosen, rejected),
        {"margin": min(chosen) - max(rejected)} if finite else {},
        prompt,
        question.task["chosen"][0],
        finish="length" if cut else "stop",
        failure="" if finite else f"the scores are not finite: {list(map(str, scores))}",
        group=question.group,
        details=details,
    )


class _ConversationEncoder:
    """Tokenizes conversations for the reward model."""

    def __init__(
        self, name: str, config: TaskConfig, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any] | None
    ) -> None:
        self._key, self._chat = f"evaluate.tasks.{name}.data", config.apply_chat_template
        self._template, self._plain = ChatTemplate(tokenizer, options), PlainText(tokenizer)
        self._escaper = SpecialTokenEscaper(tokenizer)
        if self._chat and not tokenizer.chat_template:
            message = f"got true, and the reward model's tokenizer {tokenizer.name_or_path} has no chat template. Try false"
            raise RecipeError(Problem(f"evaluate.tasks.{name}.apply_chat_template", "missing-value", message))
        if self._chat:
            check_template(tokenizer, options, "evaluate.reward_model.tokenizer.chat_template")
        self._ends = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt else []

    def encode(self, question: Question, answer: str) -> np.ndarray:
        """Return the tokens of a question with an answer, [L] int32. Special tokens in the texts stay text."""
        escape, prompt = self._escaper.escape, question.prompt
        if not self._chat:
            plain = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] or "" for message in prompt)
            tokens = [*self._plain.tokens(plain), *self._escaper.tokenize(escape(answer)), *self._plain.end]
            return np.asarray(tokens, np.int32)
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [*self._system, *turns, {"role": "assistant", "content": answer}]
        escaped = [{**message, "content": escape(message["content"] or "")} for message in messages]
        try:
            text = self._template.text(escaped, **question.template_options)
        except ValueError as error:
            description = f"question {question.id or question.index}: {error}"
            raise RecipeError(Problem(self._key, "bad-record", description)) from error
        if (stripped := text.rstrip()).endswith(self._ends):
            text = stripped  # white space after the end of the turn, as in training
        return np.asarray(self._escaper.tokenize(text), np.int32)
