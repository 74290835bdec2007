"""Render the first records of a data file with the chat template, as the job does, but without transformers.

Templates refuse some well-formed records, such as two user turns in a row, and this module finds such records before
submission. The job checks all records. A template is a program of the model's author, so it runs within bounds of time and
memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.preflight import bounded
from pipeline.config import PAIRED, DatasetConfig, Recipe, RecipeError, generates
from pipeline.data.file_tokenizer import FileTokenizer
from pipeline.data.records import RecordReader, Turns
from pipeline.data.rendering import ChatTemplate, TemplateRefusal
from pipeline.data.templates import check_template
from pipeline.data.turns import GENERATION_BLOCK, AssistantTurns

MOST_RECORDS = 256  # of a data file, which takes tens of milliseconds
MOST_CHARACTERS = 1 << 20  # of their conversations together


class RenderedRecords:
    """Renders the first records of one data set, within MOST_RECORDS and MOST_CHARACTERS."""

    def __init__(self, recipe: Recipe, dataset: DatasetConfig, tokenizer: Path | None, text: str, system: str) -> None:
        """Read the chat template.

        dataset: the data set with its recognized columns. tokenizer: path of the policy's tokenizer.json; None: render nothing.
        text: the prompt file's text, with {} for a record's input. system: the system prompt; "" without one.
        """
        self._recipe, self._characters = recipe, MOST_CHARACTERS
        self._reader = RecordReader(recipe.data, dataset, text, system or None)
        self._template: ChatTemplate | None = None
        if tokenizer is None or not recipe.data.apply_chat_template:
            return
        config = recipe.policy.tokenizer
        try:
            file_tokenizer: Any = FileTokenizer(
                tokenizer.parent, config
            )  # it has the part of transformers' interface that is used
        except RecipeError:  # the check of tokenizers reports it
            return
        if file_tokenizer.chat_template:
            self._tokenizer, self._template = file_tokenizer, ChatTemplate(file_tokenizer, config.chat_template_kwargs)

    def faults(self, records: list[tuple[int, dict[str, Any]]], notes: list[str]) -> dict[int, str]:
        """Return record number -> why the template refuses the record, or why the turns to learn are not found in its output.

        records: (number, record) pairs; records that cannot be read have no fault here. notes: receives a note if the template
        fails or takes too much time or memory.
        """
        if self._template is None:
            return {}
        try:
            faults = bounded.call(lambda: self._faults(records[:MOST_RECORDS]))
        except bounded.Unbounded as error:
            notes.append(f"policy.tokenizer.chat_template: only the job checks that it renders the records: here {error}")
            return {}
        return dict(faults)

    def _faults(self, records: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, str]]:
        faults = []
        try:
            check_template(self._tokenizer, self._recipe.policy.tokenizer.chat_template_kwargs)
        except RecipeError:  # wrong for every record: the check of tokenizers reports it
            return []
        for number, record in records:
            if self._characters <= 0:
                break
            try:
                self._render(record)
            except TemplateRefusal as error:
                faults.append((number, str(error)))
            except ValueError:  # of reading the record: another check reports it
                continue
        return faults

    def _render(self, record: dict[str, Any]) -> None:
        template = self._template
        assert template is not None
        if generates(self._recipe):
            question, options = self._reader.question(record), self._reader.template_options(record)
            if not isinstance(question, str):
                self._characters -= len(template.text(question, **options, add_generation_prompt=True))
            return
        paired = self._recipe.algorithm in PAIRED
        for example in self._reader.pair(record) if paired else (self._reader.example(record),):
            if isinstance(example, Turns):
                self._find_turns(example)

    def _find_turns(self, example: Turns) -> None:
        template = self._template
        assert template is not None
        turns = AssistantTurns(
            lambda messages, **options: template.text(messages, **example.options, **options),
            (),
            example.messages,
            example.first,
        )
        self._characters -= len(turns.text)
        if not GENERATION_BLOCK.search(self._tokenizer.get_chat_template(tools=example.options.get("tools"))):
            turns.spans()
