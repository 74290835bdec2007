"""Questions with lettered choices that the model answers in text: GPQA, MMLU, MMLU-Pro and ARC.

`knowledge.py` asks MMLU and ARC by likelihood instead.

Each class names the repository whose columns it reads. The environment `multiple_choice` scores the answers.
"""

from __future__ import annotations

import random
import re
import string
from abc import abstractmethod
from dataclasses import dataclass

from typing_extensions import override

from pipeline.data.records import text_of
from pipeline.evaluation.questions import Format, Question, Record
from pipeline.recipe.values import NotNegative, Text

STEP_BY_STEP = (
    "Answer the following multiple choice question. The last line of your response should be of the following format:"
    " 'Answer: $LETTER' (without quotes) where LETTER is one of {letters}. Think step by step before answering."
    "\n\n{question}\n\n{choices}"
)


@dataclass
class ChoicesArguments:
    """Arguments of the formats with lettered choices."""

    prompt_text: Text = STEP_BY_STEP
    """Text around a question, with {question}, {choices}, {letters} (such as ABCD) and {subject}."""
    choice_text: Text = "{letter}) {choice}"
    """Line of a choice, with {letter} and {choice}."""
    description: Text = ""
    """Text before the few-shot examples; {subject} is replaced."""
    shuffle_seed: NotNegative = 42
    """GPQA: seed of the order of the choices."""


@dataclass(frozen=True)
class _Choices:
    """The question and the choices of a record, in the same form for all repositories."""

    question: str
    choices: tuple[str, ...]
    right: int  # index of the right choice
    id: str = ""
    subject: str = ""
    solution: str = ""  # a worked example's, with its reasons; "": the letter alone


class _Lettered(Format):
    """Renders the question and the choices that `read` of a subclass takes from a record."""

    Arguments = ChoicesArguments

    @abstractmethod
    def read(self, record: Record, index: int) -> _Choices:
        """Return a record's question and choices. Raises ValueError for a record without them."""

    @override
    def question(self, record: Record, index: int) -> Question:
        read = self.read(record, index)
        if not 0 <= read.right < len(read.choices):
            raise ValueError(f"got choice {read.right + 1} as the answer; expected 1 to {len(read.choices)}")
        letters = string.ascii_uppercase[: len(read.choices)]
        lines = [
            _fill(self.arguments.choice_text, letter=letter, choice=choice)
            for letter, choice in zip(letters, read.choices, strict=True)
        ]
        prompt = _fill(
            self.arguments.prompt_text,
            question=read.question,
            choices="\n".join(lines),
            letters=letters,
            subject=read.subject.replace("_", " "),
        )
        return Question(
            id=read.id,
            prompt=prompt,
            target=f" {read.solution or letters[read.right]}",
            task={"answer": letters[read.right]},
            group=read.subject,
            description=_fill(self.arguments.description, subject=read.subject.replace("_", " ")),
        )


def _fill(text: str, **values: str) -> str:
    """Return the text with each {name} in `values` replaced by its value. Other braces stay."""
    return re.sub("|".join(rf"\{{{name}\}}" for name in values), lambda match: values[match[0][1:-1]], text)


class GPQA(_Lettered):
    """Idavidrein/gpqa. shuffle_seed and the question's text determine the random order of its choices."""

    columns = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")

    @override
    def read(self, record: Record, index: int) -> _Choices:
        question, *choices = (_clean(text_of(record, column)) for column in self.columns)
        order = list(range(len(choices)))
        random.Random(f"{self.arguments.shuffle_seed} {question}").shuffle(order)
        return _Choices(
            question,
            tuple(choices[i] for i in order),
            order.index(0),
            str(record.get("Record ID") or ""),
            str(record.get("High-level domain") or ""),
        )


def _clean(text: str) -> str:
    """Return a text of GPQA without its [title] marks and double spaces."""
    return text.strip().replace(" [title]", ". ").replace("  ", " ")


class GenerativeMMLU(_Lettered):
    """cais/mmlu, grouped by subject. Worked examples have the question's subject."""

    columns = ("question", "choices", "answer")
    examples_by_group = True

    @override
    def read(self, record: Record, index: int) -> _Choices:
        choices = tuple(str(choice) for choice in record["choices"])
        return _Choices(
            text_of(record, "question").strip(), choices, int(record["answer"]), subject=_optional(record, "subject")
        )


class MMLUPro(_Lettered):
    """TIGER-Lab/MMLU-Pro, up to ten choices, grouped by category. Worked examples show the reasoning in `cot_content`."""

    columns = ("question", "options", "answer_index", "category")
    examples_by_group = True

    @override
    def read(self, record: Record, index: int) -> _Choices:
        choices = tuple(str(choice).strip() for choice in record["options"])
        solution = _optional(record, "cot_content").removeprefix("A: Let's think step by step.").strip()
        return _Choices(
            text_of(record, "question"),
            choices,
            int(record["answer_index"]),
            _optional(record, "question_id"),
            text_of(record, "category"),
            solution,
        )


class GenerativeARC(_Lettered):
    """allenai/ai2_arc: three to five choices, labelled by letters or by numbers."""

    columns = ("question", "choices", "answerKey")

    @override
    def read(self, record: Record, index: int) -> _Choices:
        labels, choices = (list(record["choices"][key]) for key in ("label", "text"))
        key = text_of(record, "answerKey")
        if key not in labels:
            raise ValueError(f"'answerKey' is {key}; expected one of the labels {', '.join(labels)}")
        return _Choices(text_of(record, "question").strip(), tuple(choices), labels.index(key), _optional(record, "id"))


def _optional(record: Record, key: str) -> str:
    return str(record[key]) if record.get(key) is not None else ""
