r"""Find the assistant's turns in a rendered conversation, as spans of characters.

We render the whole conversation once, so its tokens are those of `apply_chat_template`. A turn begins where the generation
prompt before it ends, and it ends with the token that ends the turn:

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
                                                          ^^^^^^^^^^^^^^^

Some templates render a turn differently if more messages follow: they drop earlier thinking, for example. So we find the
borders with further renderings, in which messages have marks at the ends of their texts: the text after a mark also occurs in
the rendered conversation. If the generation prompt has more text than the conversation, such as <think>, the template has
dropped this text.

Each turn takes two renderings of all messages up to it, because a template may look at any of them.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection
from typing import Any

from pipeline.data.columns import Message
from pipeline.data.rendering import TemplateRefusal

Span = tuple[int, int]
Render = Callable[..., str]
"""(messages, add_generation_prompt=) -> text."""

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag with which a template begins the text of the assistant."""
MARK = "Qx7m"
"""The beginning of a message's mark. Marks have only letters and digits: no template, JSON writer or trimming changes them."""
THINKING = re.compile(r"</?(?:\w+:)?think(?:ing)?(?::\w+)?>|\[/?THINK\]|<\|channel>thought|<channel\|>")
"""Marks of reasoning in published templates."""
FIELDS = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")
"""Fields of a message whose texts a template writes."""
FOLLOWERS = ({"role": "user", "content": "?"}, {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "1"})


class AssistantTurns:
    """Finds the assistant's turns of one conversation. Raises ValueError if the template hides their borders."""

    def __init__(
        self,
        render: Render,
        special: Collection[str],
        messages: list[Message],
        first: int = 0,
        learn_prefilled: bool = False,
        endless: bool = False,
    ) -> None:
        """Render the conversation.

        special: the texts of the special tokens. first: the number of the first message whose turn is learned. learn_prefilled:
        whether reasoning marks of the generation prompt belong to the turn, as in TRL's training templates. endless: whether
        the template ends no turn with a token. A policy then stops at the token that opens the next message, which belongs to
        the turn.
        """
        self._render, self._messages = render, messages
        self._learn_prefilled, self._endless = learn_prefilled, endless
        self.text = render(messages)
        self._special = frozenset(special)
        longest_first = sorted((re.escape(text) for text in special if text), key=len, reverse=True)
        self._pieces = re.compile("|".join([*longest_first, THINKING.pattern, r"\w+", "."]), re.DOTALL)
        self._turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        self._mark = MARK
        while self._mark in self.text:
            self._mark += "7"

    def spans(self) -> list[Span]:
        """Return (begin, end) in `text` of each learned turn of the assistant, in order.

        Raise ValueError if a turn has no such span, or if text of another message is inside it.
        """
        spans = [(self.begin(i), self._end(i)) for i in self._turns]
        before = 0
        for i, (begin, end) in zip(self._turns, spans, strict=True):
            if not before <= begin <= end:
                raise _hidden_turn(i)
            if inside := [j for j, at in self._text_ends.items() if begin < at < end and j != i]:
                raise TemplateRefusal(
                    f"the chat template writes text of message {inside[0]} inside message {i}, a turn of the assistant"
                )
            before = end
        return spans

    def begin(self, i: int) -> int:
        """Return the position in `text` where the assistant's message i begins: after the generation prompt."""
        prompt = self._render(self._messages[:i], add_generation_prompt=True)
        if self.text.startswith(prompt) and not self._learn_prefilled:
            return len(prompt)
        for before in range(i - 1, -1, -1):
            rendered = self._after(self._messages[:i], before, prompt, add_generation_prompt=True)
            own_end = self._text_ends.get(before)
            if rendered is not None and own_end is not None:
                break
        else:
            raise _hidden_turn(i)
        header = prompt[rendered:]
        if self._learn_prefilled and (prefilled := THINKING.search(header)):
            header = header[: prefilled.start()]
        length, matched = _matching_lengths(self._split(self.text[own_end : self._text_ends.get(i)]), self._split(header))
        if not self._has_opening(i, before, header, matched) and not self._is_text_of(i, own_end + length):
            raise _hidden_turn(i)
        return own_end + length

    def _has_opening(self, i: int, before: int, header: str, matched: int) -> bool:
        """Return whether the conversation has enough of a header to open the turn of message i.

        header: the text of the generation prompt after message `before`. matched: the number of the header's characters that
        the conversation has; if more messages follow, the template may drop the rest.
        """
        closing = self._tail(self._messages[:i], before) or ""
        _, closed = _matching_lengths(self._split(closing), self._split(header))
        return bool(header[closed:matched].strip()) or not THINKING.sub("", header[closed:]).strip()

    def _is_text_of(self, i: int, at: int) -> bool:
        content = (self._messages[i].get("content") or "").strip()
        return bool(content) and self.text[at:].lstrip().startswith(content)

    def _end(self, i: int) -> int:
        """Return the position in `text` where message i ends: after the token that ends the turn, if there is one."""
        end = self._text_ends.get(i)
        if end is None:
            raise TemplateRefusal(
                f"the chat template renders no text of message {i}, a turn of the assistant, or hides where it ends"
            )
        tail = self.text[end:]
        last = i == len(self._messages) - 1
        alone = tail if last else self._tail(self._messages[: i + 1], i)
        followed = self._followed_tail(i) if last else tail
        ending = self._end_of_turn(i, alone, followed)
        return end + len(ending) + (0 if last or not self._endless else len(self._next_opening(tail[len(ending) :])))

    def _end_of_turn(self, i: int, alone: str | None, followed: str | None) -> str:
        """Return the part of the text after message i that ends its turn.

        alone, followed: the text after the message if it is the last one and if more messages follow; None if unknown.
        """
        last = i == len(self._messages) - 1
        if followed is None:
            return self._until_special(alone or "", len(alone or ""))
        if alone is None:
            return self._closing(followed, self._messages[i + 1])
        common = _common_text(self._split(alone), self._split(followed))
        specials = [piece for piece in self._split(common) if piece in self._special]
        if specials and common != alone and self._always_opens(i):
            common = common[: common.rindex(specials[-1])]
        if specials:
            return self._until_special(common, len(common))
        if any(piece in self._special for piece in self._split(alone)):
            return self._first_special(alone if last else followed)
        return common if last else common or self._closing(followed, self._messages[i + 1])

    def _always_opens(self, i: int) -> bool:
        """Return whether the template writes a generation prompt even without `add_generation_prompt`."""
        before = self._messages[:i]
        return self._render(before) == self._render(before, add_generation_prompt=True)

    def _closing(self, followed: str, message: Message) -> str:
        """Return the beginning of `followed` up to its first special token, which closes a turn before `message`.

        Return an empty text if there is no special token, or if it opens `message`.
        """
        if not any(piece in self._special for piece in self._split(followed)):
            return ""
        closing = self._first_special(followed)
        try:
            alone = self._render([message])
        except ValueError:
            return ""
        return "" if closing.strip() in alone else closing

    def _next_opening(self, followed: str) -> str:
        """Return the token that opens the next message, such as GLM's <|observation|>, unless it opens assistants' turns."""
        opening = next(iter(self._split(followed)), "")
        return opening if opening in self._special and opening not in self._openers else ""

    @functools.cached_property
    def _openers(self) -> frozenset[str]:
        """The special tokens of a generation prompt; all of them if the template refuses a question."""
        question: list[Message] = [{"role": "user", "content": "?"}]
        try:
            header = self._render(question, add_generation_prompt=True).removeprefix(self._render(question))
        except ValueError:
            return self._special
        return self._special & {*self._split(header)}

    def _until_special(self, text: str, otherwise: int) -> str:
        """Return a text up to its last special token, if only white space follows it: a sampler stops before the white space.

        otherwise: the number of characters to return of other texts.
        """
        pieces = self._split(text)
        end = max((n for n, piece in enumerate(pieces, 1) if piece in self._special), default=0)
        return text[:otherwise] if not end or "".join(pieces[end:]).strip() else "".join(pieces[:end])

    def _first_special(self, text: str) -> str:
        pieces = self._split(text)
        end = next(n for n, piece in enumerate(pieces, 1) if piece in self._special)
        return "".join(pieces[:end])

    def _followed_tail(self, i: int) -> str | None:
        for follower in FOLLOWERS:
            tail = self._tail([*self._messages, follower], i)
            if tail is not None:
                return tail
        return None

    def _after(self, messages: list[Message], i: int, text: str, **options: Any) -> int | None:
        """Return the position in `text` where the last text of message i ends; None if no rendering shows it."""
        tail = self._tail(messages, i, **options)
        return len(text) - len(tail) if tail is not None and text.endswith(tail) else None

    @functools.cached_property
    def _text_ends(self) -> dict[int, int]:
        """The number of each message -> the end of its last text in `text`. Messages that no rendering shows are absent."""
        try:
            marked = self._render([self._mark_message(message, i) for i, message in enumerate(self._messages)])
        except ValueError:
            marked = ""
        mark = re.compile(self._mark_of(r"(\d+)"))
        if mark.sub("", marked) != self.text:  # marks in all messages change more than they add: one message after the other
            measured = ((i, self._after(self._messages, i, self.text)) for i in range(len(self._messages)))
            return {i: end for i, end in measured if end is not None}
        marks = list(mark.finditer(marked))
        lengths = itertools.accumulate((len(match.group()) for match in marks), initial=0)
        return {int(match[1]): match.start() - length for match, length in zip(marks, lengths, strict=False)}

    def _tail(self, messages: list[Message], i: int, **options: Any) -> str | None:
        """Return the text that the template writes after the last text of message i.

        Return None if the template writes no text of message i, or refuses the marked messages.
        """
        try:
            text = self._render([*messages[:i], self._mark_message(messages[i], i), *messages[i + 1 :]], **options)
        except ValueError:  # the template refuses this rendering, not the record: another one may show the border
            return None
        mark = self._mark_of(i)
        return text.rpartition(mark)[2] if mark in text else None

    def _mark_of(self, i: int | str) -> str:
        """Return the mark of message i. i may also be a regular expression for its number."""
        return f"{self._mark}x{i}x"

    def _mark_message(self, message: Message, i: int) -> Message:
        """Return message i with its mark at the end of each of its texts.

        Names of tools are marked only if the message has no other text.
        """
        mark, fields = self._mark_of(i), {key: message[key] for key in FIELDS if message.get(key)}
        trailing = message["role"] == "assistant"
        marked = {key: _add_marks(value, mark, trailing) for key, value in fields.items()}
        if marked == fields:
            marked = {key: _add_marks(value, mark, trailing, names=True) for key, value in fields.items()}
        return {**message, **marked}

    def _split(self, text: str) -> list[str]:
        return self._pieces.findall(text)


def _add_marks(value: Any, mark: str, trailing: bool, names: bool = False) -> Any:
    """Return a field of a message with a mark at the end of each of its texts.

    trailing: whether the mark is after white space at the end of a text (an answer may have some) or before it (many templates
    trim texts). names: whether to mark names of tools too, which a template may repeat with the tool's result.
    """
    if isinstance(value, str):
        end = len(value) if trailing else len(value.rstrip())
        return value[:end] + mark + value[end:] if value else value
    if isinstance(value, list):
        return [_add_marks(item, mark, trailing, names) for item in value]
    if isinstance(value, dict):
        unmarked = ("id", "type") if names else ("id", "type", "name")
        return {key: item if key in unmarked else _add_marks(item, mark, trailing, names) for key, item in value.items()}
    return value


def _common_text(first: list[str], second: list[str]) -> str:
    """Return the text of the pieces that are equal at the beginnings of both lists."""
    pairs = zip(first, second, strict=False)
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _matching_lengths(left: list[str], right: list[str]) -> tuple[int, int]:
    """Return the lengths in characters of the beginnings of two lists of pieces that agree.

    White space between pieces that only one list has does not matter.
    """
    a = b = 0
    ends = (0, 0)
    while a < len(left) and b < len(right):
        if left[a] == right[b]:
            a, b = a + 1, b + 1
            ends = a, b
        elif left[a].isspace():
            a += 1
        elif right[b].isspace():
            b += 1
        else:
            break
    return len("".join(left[: ends[0]])), len("".join(right[: ends[1]]))


def _hidden_turn(message: int) -> TemplateRefusal:
    return TemplateRefusal(
        f"the chat template hides where message {message}, a turn of the assistant, begins. Try {{% generation %}} around the"
        " assistant's text in policy.tokenizer.chat_template"
    )
