"""Read the records of a data set: what they ask, what is learned from them, pairs of answers. Nothing is tokenized here.

The job reads records with this (`pipeline/data/chat.py`), and so does what checks a data file before the job is submitted.
"""

from __future__ import annotations

import itertools
import math
import string
from dataclasses import dataclass
from typing import Any

from pipeline.config import DataConfig, DatasetConfig, Message, parse_conversation

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Continuation:
    """A bare text to learn after another. prompt: None where every token of `text` is learned."""

    prompt: str | None
    text: str


@dataclass(frozen=True, slots=True)
class Turns:
    """A conversation of which the assistant's turns from message `first` on are learned."""

    messages: list[Message]
    first: int = 0


Example = Continuation | Turns


class RecordReader:
    """Reads the records of one data set. All methods raise ValueError for a record that they cannot read."""

    def __init__(self, data: DataConfig, dataset: DatasetConfig, prompt_text: str = "{}", system: str | None = None) -> None:
        """prompt_text: around what is asked, whose place is {}. system: the system prompt."""
        self.data, self.dataset = data, dataset
        self._prompt_text, self._system = prompt_text, system

    def question(self, record: Record) -> str | list[Message]:
        """Return what a prompt is made of: messages, or the bare text where no chat template is applied."""
        if self.dataset.messages_key:
            messages = messages_of(record, self.dataset.messages_key)
            asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
            if not asked:
                raise ValueError(f"'{self.dataset.messages_key}' has nothing before the assistant's answer")
            return self.completed(asked)
        key = self.dataset.input_key
        if isinstance(record.get(key), list):
            self._refuse_bare(key)
            return self.completed(_unanswered(record, key))
        text = self._prompt_text.format(text_of(record, key))
        return [*self._system_message(), {"role": "user", "content": text}] if self.data.apply_chat_template else text

    def answer(self, record: Record) -> str:
        """Return the expected answer: of a conversation that ends in one, that."""
        if self.dataset.messages_key:
            last = messages_of(record, self.dataset.messages_key)[-1]
            if last["role"] == "assistant":
                return last["content"]
        return self._answers(record)[-1]["content"]

    def _answers(self, record: Record) -> list[Message]:
        """Return what `output_key` holds; of a text, one turn of the assistant's."""
        key = self.dataset.output_key
        if not isinstance(record.get(key), list):
            return [{"role": "assistant", "content": text_of(record, key)}]
        return _answered(record, key)

    def example(self, record: Record) -> Example:
        """Return what supervised training learns from.

        Of messages the loss counts what the assistant says; of a prompt and its completion, what it says in the completion.
        TRL's `SFTTrainer` counts the same with `assistant_only_loss`, and of completions by default, but also the newline that
        a template writes after a turn's end.
        """
        if key := self.dataset.text_key:
            if not (text := text_of(record, key)).strip():
                raise ValueError(f"'{key}' is empty")
            return Continuation(None, text)
        if not self.data.apply_chat_template:
            if isinstance(record.get(self.dataset.output_key), list):
                self._refuse_bare(self.dataset.output_key)
            return Continuation(self.question(record), self.answer(record))
        if not (key := self.dataset.messages_key):
            asked = self.question(record)
            answered_before = any(message["role"] == "assistant" for message in asked)
            return Turns([*asked, *self._answers(record)], len(asked) if answered_before else 0)
        messages = messages_of(record, key)
        roles = [message["role"] for message in messages]
        if "assistant" not in roles or roles[0] == "assistant":
            raise ValueError(f"'{key}' has no assistant's turn after another's: {roles}")
        return Turns(self.completed(messages))

    def pair(self, record: Record) -> tuple[Example, Example]:
        """Return the chosen answer and the rejected one, each with the prompt."""
        keys = (self.dataset.chosen_key, self.dataset.rejected_key)
        of_messages = [isinstance(value_of(record, key), list) for key in keys]
        if of_messages[0] != of_messages[1]:
            raise ValueError(f"of '{keys[0]}' and '{keys[1]}' one is a list of messages and the other is not")
        return self._of_messages(record, keys) if of_messages[0] else self._of_texts(record, keys)

    def margin(self, record: Record) -> float:
        """Return by how much the chosen answer is better; 0 if no column says so."""
        if not (key := self.dataset.margin_key):
            return 0.0
        value = value_of(record, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"'{key}' is {value!r}, not a number")
        return float(value)

    def completed(self, messages: list[Message]) -> list[Message]:
        """Return messages with the recipe's system prompt before, unless they have one of their own, and with `prompt_text`
        around what the user says first.
        """
        messages = messages if messages[0]["role"] == "system" else [*self._system_message(), *messages]
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            return messages
        asked = {**messages[first], "content": self._prompt_text.format(messages[first]["content"])}
        return [*messages[:first], asked, *messages[first + 1 :]]

    def _system_message(self) -> list[Message]:
        return [] if self._system is None else [{"role": "system", "content": self._system}]

    def _refuse_bare(self, key: str) -> None:
        if not self.data.apply_chat_template:
            raise ValueError(f"'{key}' is a list of messages, and data.apply_chat_template is false")

    # ---- pairs ---------------------------------------------------------------------------------------------------------------

    def _of_texts(self, record: Record, keys: tuple[str, str]) -> tuple[Example, Example]:
        answers = [text_of(record, key) for key in keys]
        begun_alike = not self.dataset.input_key and not self.dataset.messages_key
        asked = {self.dataset.input_key: _begun_alike(*answers)} if begun_alike else record
        if begun_alike:
            answers = [answer[len(asked[self.dataset.input_key]) :] for answer in answers]
        for key, answer in zip(keys, answers, strict=True):
            if not answer.strip():
                raise ValueError(f"'{key}' is {'all in the other' if begun_alike else 'empty'}")
        _refuse_same(keys, *answers)
        if not self.data.apply_chat_template:
            prompt = self.question(asked)
            return tuple(Continuation(prompt, answer) for answer in answers)
        turns = self._prompt(asked)
        return tuple(Turns([*turns, {"role": "assistant", "content": answer}], len(turns)) for answer in answers)

    def _of_messages(self, record: Record, keys: tuple[str, str]) -> tuple[Example, Example]:
        self._refuse_bare(keys[0])
        chosen, rejected = (_answered(record, key) for key in keys)
        for key, messages in zip(keys, (chosen, rejected), strict=True):
            if not messages[-1]["content"].strip():
                raise ValueError(f"'{key}' does not end in an answer of the assistant's: the last one is empty")
        if chosen[0]["role"] == rejected[0]["role"] == "assistant":
            prompt = self._prompt(record)
            chosen, rejected = [*prompt, *chosen], [*prompt, *rejected]
        else:
            chosen, rejected = self.completed(chosen), self.completed(rejected)
        _refuse_same(keys, chosen, rejected)
        first = _common(chosen, rejected)
        if any(not messages[first:] or messages[first]["role"] != "assistant" for messages in (chosen, rejected)):
            both = f"'{keys[0]}' and '{keys[1]}'"
            raise ValueError(f"{both} are not two answers to the same prompt: they do not part at a turn of the assistant's")
        return Turns(chosen, first), Turns(rejected, first)

    def _prompt(self, record: Record) -> list[Message]:
        """Return the prompt of answers that do not have it in them."""
        key = self.dataset.messages_key
        return self.question(record) if key is None else self.completed(_unanswered(record, key))


def check_prompt_text(text: str) -> str:
    """Return a text that has one place {} for what is asked; its other braces are doubled, as in \\boxed{{}}. Raises ValueError
    for another one.
    """
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
        why = f"it has {fields}"
    except ValueError as error:
        fields, why = [], str(error)
    if fields != [""]:
        raise ValueError(f"expected one {{}} where the input goes, and {{{{ and }}}} for braces, but {why}")
    return text


def _refuse_same(keys: tuple[str, str], chosen: Any, rejected: Any) -> None:
    if chosen == rejected:
        raise ValueError(f"'{keys[0]}' and '{keys[1]}' are the same: nothing is preferred")


def _begun_alike(one: str, other: str) -> str:
    """Return the whole words that both begin with, without the space after them. Raises ValueError if there are none."""
    same = one[: sum(itertools.takewhile(bool, (a == b for a, b in zip(one, other, strict=False))))]
    end = max(same.rfind(" "), same.rfind("\n") + 1)
    if not same[: max(end, 0)].strip():
        raise ValueError("the answers do not begin with the same words, which are the prompt where no column has it")
    return same[:end]


def _common(one: list[Message], other: list[Message]) -> int:
    """Return how many messages both begin with."""
    same = (a["role"] == b["role"] and a["content"] == b["content"] for a, b in zip(one, other, strict=False))
    return sum(itertools.takewhile(bool, same))


def _answered(record: Record, key: str) -> list[Message]:
    messages = messages_of(record, key)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"'{key}' does not end in an answer of the assistant's: {[m['role'] for m in messages]}")
    return messages


def _unanswered(record: Record, key: str) -> list[Message]:
    messages = messages_of(record, key)
    if messages[-1]["role"] == "assistant":
        raise ValueError(f"'{key}' must end where the assistant is to answer, and its last turn is the assistant's")
    return messages


def value_of(record: Record, key: str) -> Any:
    if key not in record:
        raise ValueError(f"has no '{key}'; it has: {', '.join(record) or 'nothing'}")
    return record[key]


def text_of(record: Record, key: str) -> str:
    """Return a text or a number as a text. Raises ValueError if there is neither."""
    value = value_of(record, key)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"'{key}' is a {type(value).__name__}, not a text or a number")
    return str(value)


def messages_of(record: Record, key: str) -> list[Message]:
    """Return a list of messages with a role and a text. Raises ValueError if there is none."""
    return parse_conversation(record.get(key), key)
