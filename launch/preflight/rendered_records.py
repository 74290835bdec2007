"""Render the first records of a data file with the chat template, as the job does, but without transformers.

Templates refuse records that are well formed, such as two turns of the user in a row, and this says so before submission. The
job tokenizes all records.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.config import PAIRED, DatasetConfig, Recipe, RecipeError, generates
from pipeline.data.file_tokenizer import FileTokenizer
from pipeline.data.records import RecordReader, Turns
from pipeline.data.rendering import ChatTemplate
from pipeline.data.turns import GENERATION_BLOCK, AssistantTurns

MOST_RECORDS = 256  # of a data file, which takes tens of milliseconds
MOST_CHARACTERS = 1 << 20  # of their conversations together


class RenderedRecords:
    """Renders the records of one data set, up to the bounds."""

    def __init__(self, recipe: Recipe, dataset: DatasetConfig, tokenizer: Path | None, text: str, system: str) -> None:
        """Prepare the template.

        dataset: with its recognized columns. tokenizer: path of the policy's tokenizer.json; None renders nothing. text: around
        the input. system: the system prompt, "" without one.
        """
        self._recipe, self._left, self._characters = recipe, MOST_RECORDS, MOST_CHARACTERS
        self._reader = RecordReader(recipe.data, dataset, text, system or None)
        self._template: ChatTemplate | None = None
        if tokenizer is None or not recipe.data.apply_chat_template:
            return
        config = recipe.policy.tokenizer
        try:
            made: Any = FileTokenizer(tokenizer.parent, config)  # it has the part of transformers' interface that is used
        except RecipeError:  # the check of tokenizers reports it
            return
        if made.chat_template:
            self._tokenizer, self._template = made, ChatTemplate(made, config.chat_template_kwargs)

    def check(self, record: dict[str, Any]) -> None:
        """Raise ValueError if the template refuses a record, or hides what is to be learned of it."""
        if self._template is None or self._left <= 0 or self._characters <= 0:
            return
        self._left -= 1
        if generates(self._recipe):
            question, options = self._reader.question(record), self._reader.template_options(record)
            assert not isinstance(question, str)
            self._characters -= len(self._template.text(question, **options, add_generation_prompt=True))
            return
        paired = self._recipe.algorithm in PAIRED
        for example in self._reader.pair(record) if paired else (self._reader.example(record),):
            if isinstance(example, Turns):
                self._find_turns(example)

    def _find_turns(self, example: Turns) -> None:
        template = self._template
        assert template is not None
        found = AssistantTurns(
            lambda messages, **options: template.text(messages, **example.options, **options), (), example.messages
        )
        self._characters -= len(found.text)
        if not GENERATION_BLOCK.search(self._tokenizer.get_chat_template(tools=example.options.get("tools"))):
            found.spans(example.first)
