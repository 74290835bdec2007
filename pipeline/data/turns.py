r"""Find the assistant's turns in a rendered conversation, as spans of characters.

The conversation is rendered once, whole, and its tokens are those of `apply_chat_template`. A turn begins where the generation
prompt before it ends, and it ends with the token that ends the turn:

    <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n
                                                          ^^^^^^^^^^^^^^^

Some templates render a turn differently when more follows, such as those that drop earlier thinking. So the borders come from
renderings in which messages have marks at the ends of their texts: what follows a mark is also in the conversation that is
learned. What the generation prompt has beyond that conversation, such as <think>, was dropped by the template.

The number of renderings does not grow with the number of turns. One rendering with a mark in each message shows where all texts
end. What the template writes between a user's text and an answer is rendered for the first and the last turn after such a
message, and for the turns between them only if those two differ.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from pipeline.config import Message
from pipeline.data.rendering import TemplateRefusal

Value = TypeVar("Value")
Span = tuple[int, int]
Render = Callable[..., str]
"""(messages, add_generation_prompt=) -> text."""

GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Marks of a template around what the assistant writes."""
MARK = re.compile(r"Qx7m(\d+)x7Q")
"""A mark of a message, by its number: letters and digits alone, which no template, JSON writer or trimming changes."""
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
    ) -> None:
        """Render the conversation.

        special: texts of the special tokens. first: the message from which on turns are learned. learn_prefilled: whether
        reasoning marks of the generation prompt belong to the turn, as in TRL's training templates.
        """
        self._render, self._messages, self._learn_prefilled = render, messages, learn_prefilled
        self.text = render(messages)
        self._special = frozenset(special)
        longest_first = sorted((re.escape(text) for text in special if text), key=len, reverse=True)
        self._pieces = re.compile("|".join([*longest_first, THINKING.pattern, r"\w+", "."]), re.DOTALL)
        self._turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        before = {i: _kind(messages[i - 1]) for i in self._turns if i}
        self._headers = _OfKinds(before, self._header)
        self._closings = _OfKinds(before, lambda i: self._tail(messages[:i], i - 1) or "")
        self._opens = _OfKinds(before, self._always_opens)
        going_on = {i: _kind(messages[i]) for i in self._turns if i + 1 < len(messages)}
        self._alone = _OfKinds(going_on, lambda i: self._tail(messages[: i + 1], i))
        self._dividers = _OfKinds({i: (kind, _kind(messages[i + 1])) for i, kind in going_on.items()}, self._divider)

    def spans(self) -> list[Span]:
        """Return (begin, end) in `text` of each turn of the assistant that is learned."""
        spans = [(self.begin(i), self._end(i)) for i in self._turns]
        for i, (begin, end) in zip(self._turns, spans, strict=True):
            if others := [other for at, other in self._marks or () if begin < at < end and other != i]:
                raise TemplateRefusal(
                    f"the chat template writes text of message {others[0]} inside message {i}, a turn of the assistant"
                )
        return spans

    def begin(self, i: int) -> int:
        """Return where the assistant's message i begins: after the generation prompt."""
        distance, header = self._headers(i)
        if distance > 1:  # the header has the text of a message
            distance, header = self._header(i)
        if header is None:
            prompt = self._render(self._messages[:i], add_generation_prompt=True)
            if self.text.startswith(prompt) and not self._learn_prefilled:
                return len(prompt)
            raise _hidden(i)
        ours = self._text_end(i - distance)
        assert ours is not None
        if self._learn_prefilled and (prefilled := THINKING.search(header)):
            header = header[: prefilled.start()]
        if self.text.startswith(header, ours):
            return ours + len(header)
        window = self.text[ours : self._text_end(i)]
        length, kept = _matched([*self._split(window)], [*self._split(header)])
        if not self._has_opening(i, distance, header, kept) and not self._is_text_of(i, ours + length):
            raise _hidden(i)
        return ours + length

    def _header(self, i: int) -> tuple[int, str | None]:
        """Return (distance, header) of the assistant's message i.

        header: what the template writes between the text of message `i - distance`, the last that it shows, and the answer;
        None if it shows none.
        """
        if self._marks is not None and (text := self._with_marks(self._messages[:i], add_generation_prompt=True)):
            *_, last = [None, *MARK.finditer(text)]
            if last and int(last[1]) in self._text_ends:
                return i - int(last[1]), text[last.end() :]
        for distance in range(1, i + 1):
            if self._text_end(i - distance) is not None:
                header = self._tail(self._messages[:i], i - distance, add_generation_prompt=True)
                if header is not None:
                    return distance, header
        return 0, None

    def _has_opening(self, i: int, distance: int, header: str, kept: int) -> bool:
        """Return whether the conversation has enough of a header to open the turn of message i.

        header: as of `_header`. kept: how many characters of it the conversation has; the template may drop the rest later.
        """
        closing = self._closings(i) if distance == 1 else self._tail(self._messages[:i], i - distance) or ""
        _, closed = _matched([*self._split(closing)], [*self._split(header)])
        return bool(header[closed:kept].strip()) or not THINKING.sub("", header[closed:]).strip()

    def _is_text_of(self, i: int, at: int) -> bool:
        content = (self._messages[i].get("content") or "").strip()
        return bool(content) and self.text[at:].lstrip().startswith(content)

    def _end(self, i: int) -> int:
        """Return where the assistant's message i ends: after the token that ends the turn, if the template writes one."""
        end = self._text_end(i)
        if end is None:
            raise TemplateRefusal(
                f"the chat template renders no text of message {i}, a turn of the assistant, or hides where it ends"
            )
        tail = self.text[end:]
        last = i == len(self._messages) - 1
        alone = tail if last else self._alone(i)
        followed = self._followed_tail(i) if last else tail
        return end + len(self._end_of_turn(i, alone, followed))

    def _end_of_turn(self, i: int, alone: str | None, followed: str | None) -> str:
        """Return the end of a turn, from the texts behind it in a conversation that ends with it and in one that goes on."""
        last = i == len(self._messages) - 1
        if alone is None or followed is None:
            known = alone or followed or ""
            return self._until_special(known, len(known) if last else 0)
        same = _common(self._split(alone), self._split(followed))
        specials = [piece for piece in self._split(same) if piece in self._special]
        if specials and same != alone and self._opens(i):
            same = same[: same.rindex(specials[-1])]
        if specials:
            return self._until_special(same, len(same))
        if any(piece in self._special for piece in self._split(alone)):
            return self._first_special(alone if last else followed)
        return same if last else same or self._dividers(i)

    def _always_opens(self, i: int) -> bool:
        """Return whether the template writes a generation prompt before message i whether asked to or not."""
        before = self._messages[:i]
        return self._render(before) == self._render(before, add_generation_prompt=True)

    def _divider(self, i: int) -> str:
        """Return the special token that closes message i alone where another follows; none if it opens the next message."""
        followed = self.text[self._text_end(i) :]
        if not any(piece in self._special for piece in self._split(followed)):
            return ""
        divider = self._first_special(followed)
        try:
            alone = self._render([self._messages[i + 1]])
        except ValueError:
            return ""
        return "" if divider.strip() in alone else divider

    def _until_special(self, text: str, otherwise: int) -> str:
        """Return a text up to its last special token, where only white space follows it: a sampler stops before that.

        otherwise: how much to return of a text without one.
        """
        pieces = [*self._split(text)]
        end = max((n for n, piece in enumerate(pieces, 1) if piece in self._special), default=0)
        return text[:otherwise] if not end or "".join(pieces[end:]).strip() else "".join(pieces[:end])

    def _first_special(self, text: str) -> str:
        """Return a text up to its first special token."""
        end = next(match.end() for match in self._pieces.finditer(text) if match.group() in self._special)
        return text[:end]

    def _followed_tail(self, i: int) -> str | None:
        for follower in FOLLOWERS:
            tail = self._tail([*self._messages, follower], i)
            if tail is not None:
                return tail
        return None

    # ---- marks ---------------------------------------------------------------------------------------------------------------

    def _text_end(self, i: int) -> int | None:
        """Return where the last text of message i ends in `text`; None if no rendering shows it."""
        if self._marks is not None:
            return self._text_ends.get(i)
        tail = self._tail(self._messages, i)
        return len(self.text) - len(tail) if tail is not None and self.text.endswith(tail) else None

    @functools.cached_property
    def _marks(self) -> list[tuple[int, int]] | None:
        """(end in `text`, message) of each text in order; None if the template refuses marks in all, or writes other texts."""
        marked = self._with_marks(self._messages)
        if marked is None or MARK.sub("", marked) != self.text:
            return None
        marks = list(MARK.finditer(marked))
        before = itertools.accumulate((len(mark.group()) for mark in marks), initial=0)
        return [(mark.start() - length, int(mark[1])) for mark, length in zip(marks, before, strict=False)]

    @functools.cached_property
    def _text_ends(self) -> dict[int, int]:
        return {message: end for end, message in self._marks or ()}

    def _with_marks(self, messages: list[Message], **options: Any) -> str | None:
        """Return messages rendered with a mark in each; None if the template refuses this, which is not the record's fault."""
        try:
            return self._render([_with_mark(message, i) for i, message in enumerate(messages)], **options)
        except ValueError:
            return None

    def _tail(self, messages: list[Message], i: int, **options: Any) -> str | None:
        """Return what the template writes after the last text of message i; None if it writes no text of it, or refuses."""
        try:
            text = self._render([*messages[:i], _with_mark(messages[i], i), *messages[i + 1 :]], **options)
        except ValueError:  # as in `_with_marks`
            return None
        mark = _mark(i)
        return text.rpartition(mark)[2] if mark in text else None

    def _split(self, text: str) -> Iterator[str]:
        return (match.group() for match in self._pieces.finditer(text))


class _OfKinds(Generic[Value]):
    """What renderings show of messages, called with the number of a message.

    Messages of one kind have the value of the first of them if the last has the same.
    """

    def __init__(self, kinds: dict[int, Hashable], measure: Callable[[int], Value]) -> None:
        self._kinds, self._measure = kinds, functools.cache(measure)
        self._members: dict[Hashable, list[int]] = {}
        for i, kind in kinds.items():
            self._members.setdefault(kind, []).append(i)

    def __call__(self, i: int) -> Value:
        members = self._members[self._kinds[i]] if i in self._kinds else [i]
        first, last = self._measure(members[0]), self._measure(members[-1])
        return first if first == last else self._measure(i)


def _kind(message: Message) -> Hashable:
    """Return what a template may look at to write the end of a message: its role, its fields and the tools that it calls."""
    fields = tuple(key for key in FIELDS if message.get(key))
    called = tuple(call.get("function", call).get("name") for call in message.get("tool_calls") or ())
    return message["role"], fields, called


def _mark(i: int) -> str:
    return f"Qx7m{i}x7Q"


def _with_mark(message: Message, i: int) -> Message:
    """Return a message with the mark of number i at the end of each of its texts, or of names if it has no other texts."""
    marked = message
    for names in (False, True):
        marked = {**message, **{key: _marked(message[key], _mark(i), names) for key in FIELDS if message.get(key)}}
        if marked != message:
            break
    return marked


def _marked(value: Any, mark: str, names: bool) -> Any:
    """Return a field of a message with the mark at the end of each of its texts.

    names: also of a tool's name, which a template may repeat with the tool's result.
    """
    if isinstance(value, str):
        return value + mark if value else value
    if isinstance(value, list):
        return [_marked(item, mark, names) for item in value]
    if isinstance(value, dict):
        kept = ("id", "type") if names else ("id", "type", "name")
        return {key: item if key in kept else _marked(item, mark, names) for key, item in value.items()}
    return value


def _common(one: Iterable[str], other: Iterable[str]) -> str:
    """Return the text of the pieces that both begin with."""
    pairs = zip(one, other, strict=False)
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _matched(ours: list[str], theirs: list[str]) -> tuple[int, int]:
    """Return how many characters of two lists of pieces agree, but for white space that one alone has between pieces."""
    a = b = 0
    ends = (0, 0)
    while a < len(ours) and b < len(theirs):
        if ours[a] == theirs[b]:
            a, b = a + 1, b + 1
            ends = a, b
        elif ours[a].isspace():
            a += 1
        elif theirs[b].isspace():
            b += 1
        else:
            break
    return len("".join(ours[: ends[0]])), len("".join(theirs[: ends[1]]))


def _hidden(message: int) -> TemplateRefusal:
    return TemplateRefusal(
        f"the chat template hides where message {message}, a turn of the assistant, begins. Try {{% generation %}} around the"
        " assistant's text in policy.tokenizer.chat_template"
    )
