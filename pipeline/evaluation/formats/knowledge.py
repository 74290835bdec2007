"""Exam questions by likelihood, with the prompts of lm-evaluation-harness's tasks of these names."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from pipeline.data.records import text_of
from pipeline.evaluation.formats.commonsense import choice_question, labelled_choices
from pipeline.evaluation.questions import Format, Question, Record

LETTERS = "ABCD"


class ARC(Format):
    """ARC (Clark et al., 2018), the easy and the challenge set: science exams of grade schools."""

    columns: ClassVar[tuple[str, ...]] = ("question", "choices", "answerKey")

    @override
    def question(self, record: Record, index: int) -> Question:
        return choice_question(f"Question: {record['question']}\nAnswer:", *labelled_choices(record))


class MMLU(Format):
    """MMLU (Hendrycks et al., 2021): exams of 57 subjects. The answer's letter is scored.

    Worked examples have the question's subject.
    """

    columns: ClassVar[tuple[str, ...]] = ("question", "choices", "answer", "subject")
    examples_by_group: ClassVar[bool] = True

    @override
    def question(self, record: Record, index: int) -> Question:
        subject, choices = text_of(record, "subject"), record["choices"]
        if len(choices) != len(LETTERS):
            raise ValueError(f"has {len(choices)} choices; expected {len(LETTERS)}")
        lines = "".join(f"{letter}. {choice}\n" for letter, choice in zip(LETTERS, choices, strict=True))
        about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        prompt = f"{text_of(record, 'question').strip()}\n{lines}Answer:"
        return choice_question(prompt, LETTERS, int(record["answer"]), subject, about)
