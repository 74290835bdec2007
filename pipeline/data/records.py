"""Read the columns of a record: prompts, training examples and pairs of answers. Nothing is tokenized here.

A key such as `reward_model.ground_truth` names a field of a nested column, unless a column has exactly this name.

Both the job (`pipeline/data/chat.py`) and the checks of data files before submission use this module.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import itertools
import math
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.config import LABELED, PAIRED, DataConfig, DatasetConfig
from pipeline.data.columns import Message, column, parse_conversation
from pipeline.data.media import refuse_media
from pipeline.data.template_fields import read_messages, template_options

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Continuation:
    """A plain text that a model learns as the continuation of `prompt`. If `prompt` is None, the loss counts all of `text`."""

    prompt: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Turns:
    """A conversation. The loss counts the assistant's turns from message `first` on."""

    messages: list[Message]
    first: int = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the chat template: `RecordReader.template_options`


Example = Continuation | Turns


class RecordReader:
    """Reads the records of one data set. All methods raise ValueError for a record that they cannot read."""

    def __init__(
        self,
        data: DataConfig,
        dataset: DatasetConfig,
        prompt_text: str = "{}",
        system: str | None = None,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Set the columns and the texts around the input.

        prompt_text: text around the input, which replaces {}. system: the system prompt. tools: JSON schemas of the tools that
        prompts show if a record has no tools of its own.
        """
        self.data, self.dataset, self.tools = data, dataset, tools
        self._prompt_text, self._system = prompt_text, system

    def question(self, record: Record) -> str | list[Message]:
        """Return a record's prompt: messages, or plain text if data.apply_chat_template is false."""
        refuse_media(record)
        if self.dataset.messages_key:
            messages = messages_of(record, self.dataset.messages_key)
            prompt = messages[:-1] if messages[-1]["role"] == "assistant" else messages
            if not prompt:
                raise ValueError(f"'{self.dataset.messages_key}' has nothing before the assistant's answer")
            return self.complete_messages(prompt)
        key = self.dataset.input_key
        if isinstance(column(record, key), list):
            self._refuse_bare(key)
            return self.complete_messages(_messages_without_answer(record, key))
        text = self._prompt_text.format(text_of(record, key))
        return [*self._system_message(), {"role": "user", "content": text}] if self.data.apply_chat_template else text

    def answer(self, record: Record) -> str:
        """Return the expected answer: the conversation's last turn if it is the assistant's, else the text in `output_key`."""
        if self.dataset.messages_key:
            last = messages_of(record, self.dataset.messages_key)[-1]
            if last["role"] == "assistant":
                return _content(last, self.dataset.messages_key)
        return _content(self._answers(record)[-1], self.dataset.output_key)

    def check_fields(self, record: Record, fields: Iterable[str]) -> None:
        """Raise ValueError if a record lacks a field that a reward function needs (`pipeline/environments/reward_forms.py`)."""
        for field in fields:
            if (field == "expected" and field not in record) or (field == GROUND_TRUTH and ground_truth(record) is None):
                self.answer(record)
            elif field != GROUND_TRUTH:
                value_of(record, field)

    def _answers(self, record: Record) -> list[Message]:
        """Return the messages in `output_key`; a text becomes one assistant's turn."""
        key = self.dataset.output_key
        if not isinstance(column(record, key), list):
            return [{"role": "assistant", "content": text_of(record, key)}]
        return _messages_with_answer(record, key)

    def example(self, record: Record) -> Example:
        """Return the example for supervised training.

        For messages the loss counts all turns of the assistant; for a prompt and its completion, those of the completion. TRL's
        `SFTTrainer` counts the same turns (messages: with `assistant_only_loss`; completions: by default), and also the newline
        that a template writes after a turn.
        """
        refuse_media(record)
        if key := self.dataset.text_key:
            if not (text := text_of(record, key)).strip():
                raise ValueError(f"'{key}' is empty")
            return Continuation(None, text)
        if not self.data.apply_chat_template:
            if isinstance(column(record, self.dataset.output_key), list):
                self._refuse_bare(self.dataset.output_key)
            return Continuation(self._text_question(record), self.answer(record))
        if not (key := self.dataset.messages_key):
            prompt = self._prompt(record)
            answered_before = any(message["role"] == "assistant" for message in prompt)
            first = len(prompt) if answered_before else 0
            return Turns([*prompt, *self._answers(record)], first, self.template_options(record))
        messages = messages_of(record, key)
        roles = [message["role"] for message in messages]
        if "assistant" not in roles or roles[0] == "assistant":
            raise ValueError(f"'{key}' has the roles {roles}; expected an assistant's turn, but not as the first turn")
        return Turns(self.complete_messages(messages), options=self.template_options(record))

    def pair(self, record: Record) -> tuple[Example, Example]:
        """Return (chosen, rejected), the two answers as examples, each with the prompt."""
        refuse_media(record)
        keys = (self.dataset.chosen_key, self.dataset.rejected_key)
        of_messages = [isinstance(value_of(record, key), list) for key in keys]
        if of_messages[0] != of_messages[1]:
            raise ValueError(
                f"one of '{keys[0]}' and '{keys[1]}' is a list of messages and the other is not; expected two lists or texts"
            )
        return self._of_messages(record, keys) if of_messages[0] else self._of_texts(record, keys)

    def labeled(self, record: Record) -> list[tuple[Example, bool]]:
        """Return (answer, whether it is good) of a record: one answer with its label, or both of a pair."""
        if self.dataset.label_key is None:
            chosen, rejected = self.pair(record)
            return [(chosen, True), (rejected, False)]
        return [(self.example(record), _label(record, self.dataset.label_key))]

    def learned(self, algorithm: str, record: Record) -> list[Example]:
        """Return the examples that an algorithm learns from a record: both answers of a pair, else one."""
        if algorithm in PAIRED:
            return [*self.pair(record)]
        return [example for example, _ in self.labeled(record)] if algorithm in LABELED else [self.example(record)]

    def template_options(self, record: Record) -> dict[str, Any]:
        """Return the record's options of the chat template, such as `tools`; see `pipeline.data.template_fields`."""
        return template_options(record, self.dataset.tools_key, self.tools) if self.data.apply_chat_template else {}

    def margin(self, record: Record) -> float:
        """Return by how much the chosen answer is better; 0 without a margin column."""
        if not (key := self.dataset.margin_key):
            return 0.0
        value = value_of(record, key)
        if isinstance(value, str):  # of CSV
            with contextlib.suppress(ValueError):
                value = float(value)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"'{key}' is {value!r}, not a finite number")
        return float(value)

    def complete_messages(self, messages: list[Message]) -> list[Message]:
        """Return messages with the system prompt, unless they begin with one, and `prompt_text` around the first user turn."""
        messages = messages if messages[0]["role"] == "system" else [*self._system_message(), *messages]
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            return messages
        turn = {**messages[first], "content": self._prompt_text.format(messages[first]["content"])}
        return [*messages[:first], turn, *messages[first + 1 :]]

    def _system_message(self) -> list[Message]:
        return [] if self._system is None else [{"role": "system", "content": self._system}]

    def _refuse_bare(self, key: str) -> None:
        if not self.data.apply_chat_template:
            raise ValueError(f"'{key}' is a list of messages; expected a string, since data.apply_chat_template is false")

    # ---- pairs ---------------------------------------------------------------------------------------------------------------

    def _of_texts(self, record: Record, keys: tuple[str, str]) -> tuple[Example, Example]:
        answers = [text_of(record, key) for key in keys]
        begun_alike = not self.dataset.input_key and not self.dataset.messages_key
        record_with_prompt = {self.dataset.input_key: _common_beginning(*answers)} if begun_alike else record
        if begun_alike:
            answers = [answer[len(record_with_prompt[self.dataset.input_key]) :] for answer in answers]
        for key, answer in zip(keys, answers, strict=True):
            if not answer.strip():
                raise ValueError(f"'{key}' is {'the beginning of the other answer' if begun_alike else 'empty'}")
        chosen, rejected = answers
        _refuse_same(keys, chosen, rejected)
        if not self.data.apply_chat_template:
            prompt = self._text_question(record_with_prompt)
            return Continuation(prompt, chosen), Continuation(prompt, rejected)
        turns = self._prompt(record_with_prompt)
        first, second = ({"role": "assistant", "content": answer} for answer in (chosen, rejected))
        options = self.template_options(record)
        return Turns([*turns, first], len(turns), options), Turns([*turns, second], len(turns), options)

    def _of_messages(self, record: Record, keys: tuple[str, str]) -> tuple[Example, Example]:
        self._refuse_bare(keys[0])
        chosen, rejected = (_messages_with_answer(record, key) for key in keys)
        for key, messages in zip(keys, (chosen, rejected), strict=True):
            if not messages[-1].get("tool_calls") and not messages[-1]["content"].strip():
                raise ValueError(f"'{key}' ends in an empty turn of the assistant; expected an answer")
        if chosen[0]["role"] == rejected[0]["role"] == "assistant":
            prompt = self._prompt(record)
            chosen, rejected = [*prompt, *chosen], [*prompt, *rejected]
        else:
            chosen, rejected = self.complete_messages(chosen), self.complete_messages(rejected)
        _refuse_same(keys, chosen, rejected)
        first = _count_common_messages(chosen, rejected)
        if any(not messages[first:] or messages[first]["role"] != "assistant" for messages in (chosen, rejected)):
            names = f"'{keys[0]}' and '{keys[1]}'"
            raise ValueError(
                f"{names} are not two answers to the same prompt: their first difference is not an assistant's turn"
            )
        options = self.template_options(record)
        return Turns(chosen, first, options), Turns(rejected, first, options)

    def _prompt(self, record: Record) -> list[Message]:
        """Return the messages of the prompt, for a record whose answers do not repeat the prompt."""
        if key := self.dataset.messages_key:
            return self.complete_messages(_messages_without_answer(record, key))
        question = self.question(record)
        assert not isinstance(question, str)
        return question

    def _text_question(self, record: Record) -> str:
        if not isinstance(question := self.question(record), str):
            raise ValueError("a list of messages needs a chat template; expected data.apply_chat_template=true")
        return question


def check_prompt_text(text: str) -> str:
    r"""Return the text unchanged. Raise ValueError if it does not have exactly one {} for the input.

    Other braces must be doubled, as in \boxed{{}}.
    """
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
        reason = f"got the fields {fields}"
    except ValueError as error:
        fields, reason = [], str(error)
    if fields != [""]:
        raise ValueError(f"{reason}; expected one {{}}, for the input. Try {{{{ and }}}} for other braces")
    return text


LABELS: dict[Any, bool] = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}
"""Texts of labels, as in CSV, in lower case."""


def _label(record: Record, key: str) -> bool:
    value = value_of(record, key)
    if str(value).lower() not in LABELS:
        raise ValueError(f"'{key}' is {value!r}; expected true or false, or 1 or 0")
    return LABELS[str(value).lower()]


def _content(message: Message, key: str) -> str:
    if message["content"] is None:
        raise ValueError(f"'{key}' ends in tool calls without a text; expected an answer")
    return message["content"]


def _refuse_same(keys: tuple[str, str], chosen: Any, rejected: Any) -> None:
    if chosen == rejected:
        raise ValueError(f"'{keys[0]}' and '{keys[1]}' are the same; expected two different answers")


def _common_beginning(first: str, second: str) -> str:
    """Return the whole words with which both texts begin, without the space after them. Raise ValueError if there are none."""
    common = first[: sum(itertools.takewhile(bool, (a == b for a, b in zip(first, second, strict=False))))]
    end = max(common.rfind(" "), common.rfind("\n") + 1)
    if not common[: max(end, 0)].strip():
        raise ValueError("the answers have no common beginning; expected a common prompt, since no column has it")
    return common[:end]


def _count_common_messages(first: list[Message], second: list[Message]) -> int:
    """Return the number of equal messages at the beginnings of two lists."""
    equal = (a == b for a, b in zip(first, second, strict=False))
    return sum(itertools.takewhile(bool, equal))


def _messages_with_answer(record: Record, key: str) -> list[Message]:
    messages = messages_of(record, key)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"'{key}' does not end in an answer of the assistant; the roles are {[m['role'] for m in messages]}")
    return messages


def _messages_without_answer(record: Record, key: str) -> list[Message]:
    messages = messages_of(record, key)
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"'{key}' must end before the assistant's answer; got an assistant's turn as the last turn")
    return messages


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text. Raise ValueError for another text."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def parse_record(line: bytes, expected: str = "one JSON object a line") -> Record:
    """Return the record in a line of a data file. Raise ValueError for a line that is not a JSON object."""
    try:
        record = parse_json(line)
    except ValueError as error:
        fault = "a byte order mark at its beginning" if line.startswith(codecs.BOM_UTF8) else error
        raise ValueError(f"not JSON: {fault}; expected {expected}") from None
    if not isinstance(record, dict):
        mend = ". Try one record a line: jq -c '.[]' FILE > NEW.jsonl" if isinstance(record, list) else ""
        raise ValueError(f"got a {type(record).__name__}; expected a JSON object{mend}")
    return record


GROUND_TRUTH, OF_VERL = "ground_truth", "reward_model.ground_truth"
"""A field of reward functions, and the nested column of verl's data that has it."""


def ground_truth(record: Record) -> Any:
    """Return the field `ground_truth` of a record, or that of verl's column, or the expected answer; None without any."""
    return next((value for name in (GROUND_TRUTH, OF_VERL, "expected") if (value := column(record, name)) is not None), None)


_ABSENT = object()


def value_of(record: Record, key: str) -> Any:
    """Return the value of a column. Raise ValueError if there is no such column."""
    if (value := column(record, key, _ABSENT)) is _ABSENT:
        raise ValueError(f"has no '{key}'; it has: {', '.join(record) or 'nothing'}")
    return value


def text_of(record: Record, key: str) -> str:
    """Return the text in a column. A number becomes a text. Raise ValueError for other values."""
    value = value_of(record, key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"'{key}' is a {type(value).__name__}, not a string or a number")
    return str(value)


def messages_of(record: Record, key: str) -> list[Message]:
    """Return the messages in a column, in the form of `template_fields.read_messages`. Raise ValueError for other values."""
    return read_messages(parse_conversation(column(record, key), key))


def plain_columns(record: Record) -> Record:
    """Return a record without the columns that cannot be sent between ranks, such as images."""
    return {key: plain for key, value in record.items() if (plain := _plain(value)) is not _NO_PLAIN}


_NO_PLAIN = object()


def _plain(value: Any) -> Any:
    """Return a value in a form that can be sent between ranks; _NO_PLAIN if it has none, such as an image."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if hasattr(value, "tolist"):  # numpy's
        return _plain(value.tolist())
    if isinstance(value, dict):
        values = {str(key): _plain(item) for key, item in value.items()}
        return _NO_PLAIN if _NO_PLAIN in values.values() else values
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _NO_PLAIN if any(item is _NO_PLAIN for item in items) else items
    return _NO_PLAIN
