"""Documents whose likelihood is measured, for the kind `perplexity`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from typing_extensions import override

from pipeline.data.records import text_of
from pipeline.evaluation.questions import Format, Question, Record
from pipeline.recipe.values import Text


@dataclass
class DocumentsArguments:
    """Columns of the records."""

    text_key: Annotated[Text, Field(description="Column of the text.")] = "text"
    group_key: Annotated[Text | None, Field(description="Column of a category; each category gets scores. null: none.")] = None


class Documents(Format):
    """Turns each record into a question whose prompt is the record's text."""

    Arguments = DocumentsArguments

    @property
    @override
    def required(self) -> tuple[str, ...]:
        return tuple(key for key in (self.arguments.text_key, self.arguments.group_key) if key is not None)

    @override
    def question(self, record: Record, index: int) -> Question:
        group = self.arguments.group_key
        return Question("", text_of(record, self.arguments.text_key), group=text_of(record, group) if group else "")
