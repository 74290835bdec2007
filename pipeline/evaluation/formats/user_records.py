"""Records whose columns the user names: questions with expected answers, and documents of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from pipeline.data.records import messages_of, plain_columns, text_of, value_of
from pipeline.data.template_fields import template_options
from pipeline.evaluation.questions import Format, Question, Record
from pipeline.recipe.values import Text


@dataclass
class RecordsArguments:
    """Columns of the records."""

    prompt_key: Text = "prompt"
    """Column of the prompt: a string, or messages {role, content}."""
    answer_key: Text | None = "answer"
    """Column of the expected answer. null: the environment needs none."""
    id_key: Text | None = None
    """Column of the record's id. null: made from its position and content."""
    group_key: Text | None = None
    """Column of a category; each category gets scores. null: none."""
    tools_key: Text | None = "tools"
    """Column of the tools for the chat template, like tools_key of `data`. null: none."""
    prompt_text: Text = "{question}"
    """Text around a prompt; {question} stands for the prompt."""


class Records(Format):
    """Turns the user's records into questions. The environment gets the expected answer, and all columns as `record`."""

    Arguments = RecordsArguments

    @property
    @override
    def required(self) -> tuple[str, ...]:
        keys = (self.arguments.prompt_key, self.arguments.answer_key, self.arguments.id_key, self.arguments.group_key)
        return tuple(key for key in keys if key is not None)

    @override
    def question(self, record: Record, index: int) -> Question:
        keys = self.arguments
        prompt = value_of(record, keys.prompt_key)
        if isinstance(prompt, list):
            prompt = messages_of(record, keys.prompt_key)
        else:
            prompt = keys.prompt_text.replace("{question}", text_of(record, keys.prompt_key))
        answer = text_of(record, keys.answer_key) if keys.answer_key is not None else ""
        return Question(
            id=text_of(record, keys.id_key) if keys.id_key is not None else "",
            prompt=prompt,
            target=f" {answer}" if answer else "",
            task={"answer": answer, "record": plain_columns(record)},
            template_options=template_options(record, keys.tools_key),
            group=text_of(record, keys.group_key) if keys.group_key is not None else "",
        )


@dataclass
class HarnessArguments:
    """Columns of the records of a task of lm-evaluation-harness."""

    group_key: Text | None = "subject"
    """Column of a category; each category gets scores. Of a group such as mmlu it has the tasks' dataset_name, such as anatomy.
    null: none."""
    text_key: Text = "text"
    """format=documents: column of the text."""


class HarnessRecords(Format):
    """Records that a task of lm-evaluation-harness asks. A question's prompt has all texts of its record."""

    Arguments = HarnessArguments

    @override
    def question(self, record: Record, index: int) -> Question:
        group = record.get(self.arguments.group_key)
        return Question("", "\n".join(texts_in(record)), group="" if group is None else str(group))


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a record, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)
