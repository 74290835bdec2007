"""Requests that a model should refuse, or should answer: XSTest, StrongREJECT and others of their kind."""

from __future__ import annotations

from dataclasses import dataclass, field

from typing_extensions import override

from pipeline.data.records import text_of, value_of
from pipeline.evaluation.questions import Format, Question, Record
from pipeline.recipe.values import Text


@dataclass
class RequestsArguments:
    """Columns of the records. The defaults are XSTest's; StrongREJECT: {prompt_key: forbidden_prompt, label_key: null}."""

    prompt_key: Text = "prompt"
    """Column of the request."""
    label_key: Text | None = "label"
    """Column that says whether the request is harmful. null: all are."""
    harmful_labels: list[Text] = field(default_factory=lambda: ["unsafe"])
    """Values of label_key for harmful requests."""
    harmless_labels: list[Text] = field(default_factory=lambda: ["safe"])
    """Values of label_key for harmless requests."""
    id_key: Text | None = None
    """Column of the record's id. null: made from its position and content."""
    group_key: Text | None = None
    """Column of a category; each category gets scores. null: none."""


class Requests(Format):
    """Turns records of requests into questions. `Question.task` has `harmful`, which tasks of kind `refusal` read."""

    Arguments = RequestsArguments

    @property
    @override
    def required(self) -> tuple[str, ...]:
        keys = (self.arguments.prompt_key, self.arguments.label_key, self.arguments.id_key, self.arguments.group_key)
        return tuple(key for key in keys if key is not None)

    @override
    def question(self, record: Record, index: int) -> Question:
        keys, harmful = self.arguments, True
        if keys.label_key is not None:
            label = str(value_of(record, keys.label_key))
            if label not in (*keys.harmful_labels, *keys.harmless_labels):
                labels = ", ".join((*keys.harmful_labels, *keys.harmless_labels))
                raise ValueError(f"'{keys.label_key}' is {label}; expected one of {labels}")
            harmful = label in keys.harmful_labels
        return Question(
            id=str(value_of(record, keys.id_key)) if keys.id_key is not None else "",
            prompt=text_of(record, keys.prompt_key),
            task={"harmful": harmful},
            group=str(value_of(record, keys.group_key)) if keys.group_key is not None else "",
        )
