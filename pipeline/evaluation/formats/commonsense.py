"""Choices of common sense by likelihood, with the prompts of lm-evaluation-harness's tasks of these names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from pipeline.data.records import text_of
from pipeline.evaluation.questions import Format, Question, Record

_ARTIFACT = re.compile(r"\[.*?\]")  # of WikiHow's pages, such as [step]


class HellaSwag(Format):
    """HellaSwag (Zellers et al., 2019): choose the ending of a description of an activity."""

    columns: ClassVar[tuple[str, ...]] = ("activity_label", "ctx_a", "ctx_b", "endings", "label")
    draws_one_more: ClassVar[bool] = True

    @override
    def question(self, record: Record, index: int) -> Question:
        context = f"{text_of(record, 'activity_label')}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
        return choice_question(_clean(context), [_clean(ending) for ending in record["endings"]], int(record["label"]))


class WinoGrande(Format):
    """WinoGrande (Sakaguchi et al., 2019): choose the noun that a blank stands for.

    The rest of the sentence is scored after each of the two nouns.
    """

    columns: ClassVar[tuple[str, ...]] = ("sentence", "option1", "option2", "answer")
    draws_one_more: ClassVar[bool] = True

    @override
    def question(self, record: Record, index: int) -> Question:
        before, blank, after = text_of(record, "sentence").partition("_")
        if not blank or str(record["answer"]) not in ("1", "2"):
            raise ValueError(
                f"got sentence '{record['sentence']}', answer '{record['answer']}'; expected a blank '_', and the answer 1 or 2"
            )
        prompts = (before + record["option1"], before + record["option2"])
        right, end = int(record["answer"]) - 1, after.strip()
        return Question("", prompts[right], f" {end}", choices=(end, end), prompts=prompts, correct=(right,))


class PIQA(Format):
    """PIQA (Bisk et al., 2020): choose the one of two ways that reaches a physical goal."""

    columns: ClassVar[tuple[str, ...]] = ("goal", "sol1", "sol2", "label")
    draws_one_more: ClassVar[bool] = True

    @override
    def question(self, record: Record, index: int) -> Question:
        return choice_question(f"Question: {record['goal']}\nAnswer:", [record["sol1"], record["sol2"]], int(record["label"]))


class OpenBookQA(Format):
    """OpenBookQA (Mihaylov et al., 2018): questions of elementary science."""

    columns: ClassVar[tuple[str, ...]] = ("question_stem", "choices", "answerKey")

    @override
    def question(self, record: Record, index: int) -> Question:
        return choice_question(text_of(record, "question_stem"), *labelled_choices(record))


class BoolQ(Format):
    """BoolQ (Clark et al., 2019), with the columns of SuperGLUE: answer yes or no to a question about a passage."""

    columns: ClassVar[tuple[str, ...]] = ("passage", "question", "label")
    draws_one_more: ClassVar[bool] = True

    @override
    def question(self, record: Record, index: int) -> Question:
        prompt = f"{record['passage']}\nQuestion: {record['question']}?\nAnswer:"
        return choice_question(prompt, ["no", "yes"], int(record["label"]))


class Lambada(Format):
    """LAMBADA (Paperno et al., 2016), for the kind `continuation`: the last word of a passage is scored."""

    columns: ClassVar[tuple[str, ...]] = ("text",)

    @override
    def question(self, record: Record, index: int) -> Question:
        before, _, word = text_of(record, "text").rpartition(" ")
        return choice_question(before, [word], 0)


def choice_question(prompt: str, choices: Sequence[str], right: int, group: str = "", description: str = "") -> Question:
    """Return a question whose choices continue its prompt. Raises ValueError unless `right` is the index of a choice."""
    if not 0 <= right < len(choices):
        raise ValueError(f"got {right} as the index of the right choice; expected 0 to {len(choices) - 1}")
    return Question(
        "",
        prompt,
        f" {choices[right]}",
        choices=tuple(choices),
        correct=(right,),
        group=group,
        description=description,
    )


def labelled_choices(record: Record) -> tuple[list[str], int]:
    """Return (texts of the choices, index of the right choice) of a record.

    The column `choices` is {"text": [..], "label": [..]}; `answerKey` is the label of the right choice.
    """
    choices, key = record["choices"], text_of(record, "answerKey").lstrip()
    if key not in choices["label"]:
        raise ValueError(f"'answerKey' is '{key}'; expected one of {', '.join(choices['label'])}")
    return list(choices["text"]), list(choices["label"]).index(key)


def _clean(text: str) -> str:
    """Return a text of WikiHow without layout marks such as [step]; [title] becomes a full stop."""
    return _ARTIFACT.sub("", text.strip().replace(" [title]", ". ")).replace("  ", " ")
