r"""Find the tokens with which a chat template ends an assistant's turn, by rendering conversations.

    ChatML         ...4<|im_end|>\n                        last <|im_end|>    between <|im_end|>
    gpt-oss        ...4<|return|>                          last <|return|>    between <|end|>
    Mistral        ...4</s>                                last </s>          between </s>
    no end         ...4\n                                  nothing

`last` ends a conversation, so supervised training teaches it and a policy samples it. `between` is what the template writes
between an assistant's turn and the next one. Tokens of an end are special tokens or other added tokens of the tokenizer: an
end that the tokenizer splits into several ordinary tokens cannot end a completion.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2

from pipeline.data.columns import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER, QUESTION = "Understood7", "Answered7"  # texts that no template contains
_SAID: list[Message] = [{"role": "assistant", "content": ANSWER}]
_ASKED: list[Message] = [*_SAID, {"role": "user", "content": QUESTION}]
_CALL: Any = {"type": "function", "id": "call00001", "function": {"name": "Called7", "arguments": {}}}
RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""Exceptions that a chat template raises for a conversation that it cannot render."""


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """The tokens that end an assistant's turn, as texts; an empty text stands for no token."""

    last: str = ""  # of a conversation that ends there
    between: str = ""  # that the template writes in every case, where another turn follows or none does
    call: str = ""  # of a turn that calls a tool
    inner: str = ""  # text, with white space before it, that a turn's own end replaces when another turn follows
    why: str = ""  # why there is none

    @property
    def stops(self) -> tuple[str, ...]:
        """The tokens that end a completion, first the token that supervised training teaches."""
        return tuple(dict.fromkeys(text for text in (self.last, self.between) if text))

    @property
    def texts(self) -> frozenset[str]:
        """The tokens that end a turn. After one of them `Observations` does not add the template's end of the turn."""
        return frozenset(text for text in (self.last, self.between, self.call) if text)


def find_turn_ends(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None = None) -> TurnEnds:
    """Return the turn ends of the tokenizer's chat template; empty if there is no template or it cannot render an answer."""
    if not tokenizer.chat_template:
        return TurnEnds(why="there is no chat template")
    return _TurnEndFinder(tokenizer, template_kwargs or {}).find()


class _TurnEndFinder:
    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> None:
        self._tokenizer, self._template_kwargs = tokenizer, template_kwargs
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.content.strip()]
        eos = {str(tokenizer.eos_token)} if tokenizer.eos_token else set()
        texts, self._special = ({token.content for token in tokens} | eos for tokens in (added, filter(_is_special, added)))
        longest_first = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
        self._mark = re.compile(f"({longest_first})" if texts else r"(?!)")

    def find(self) -> TurnEnds:
        try:
            alone = self._render(_SAID)
        except RENDER_ERRORS as error:
            return TurnEnds(why=f"it cannot render an answer: {error}")
        before, answer, tail = alone.rpartition(ANSWER)
        if not answer:
            return TurnEnds(why="it renders no text of the assistant")
        if self._always_opens_an_answer():
            last, between, inner = self._before_an_opening(tail, self._openers(before))
        else:
            last, between, inner = self._at_the_end(tail, self._openers(before))
        text = tail.strip()
        reason = (
            f"it writes {text[:40]!r} after an answer, which is not an added token"
            if text
            else "it writes nothing after an answer"
        )
        return TurnEnds(last, between, self._end_of_call(), inner, "" if last or between else reason)

    def _at_the_end(self, tail: str, openers: set[str]) -> tuple[str, str, str]:
        """Return (last, between, inner) of `TurnEnds`. tail: the text after an answer that ends a conversation."""
        ends = [match for match in self._mark.finditer(tail) if not tail[match.end() :].strip()]
        if not ends:
            return "", "", ""
        last, turn_end, followed = ends[-1].group(), tail[: ends[-1].end()], self._tail_before_question()
        if followed.startswith(turn_end):
            return last, last, turn_end
        (marks, text), (inner_marks, _) = self._run(turn_end), self._run(followed)
        if not text and (common := _common_beginning(marks, inner_marks)):
            return last, common[-1], self._begin(followed, len(common))
        replaced = bool(inner_marks) and self._ends_a_users_turn(inner_marks[0], openers)
        return last, "", self._begin(followed, int(replaced))

    def _before_an_opening(self, tail: str, openers: set[str]) -> tuple[str, str, str]:
        """Return (last, between, inner) of `TurnEnds` for a tail that also has the beginning of the next answer."""
        followed = self._tail_before_question()
        marks, text = self._run(tail)
        common = _common_beginning(marks, self._run(followed)[0])
        while common and common[-1] in openers:
            common.pop()
        if common:
            return common[-1], common[-1], self._begin(followed, len(common))
        return (marks[-1] if marks and not text.strip() and not openers & set(marks) else ""), "", ""

    def _render(self, turns: list[Message], **options: Any) -> str:
        """Return a rendered conversation that begins with a user's turn."""
        messages = [{"role": "user", "content": "?"}, *turns]
        return str(self._tokenizer.apply_chat_template(messages, **{**self._template_kwargs, "tokenize": False, **options}))

    def _tail_before_question(self) -> str:
        """Return the text between an answer and the next question; an empty text if no question can follow."""
        try:
            _, _, tail = self._render(_ASKED, add_generation_prompt=True).partition(ANSWER)
        except RENDER_ERRORS:
            return ""
        between, question, _ = tail.partition(QUESTION)
        return between if question else ""

    def _always_opens_an_answer(self) -> bool:
        """Return whether `add_generation_prompt` has no effect."""
        return self._render(_SAID) == self._render(_SAID, add_generation_prompt=True)

    def _openers(self, before: str) -> set[str]:
        """Return the tokens that begin turns: those before the first word of a conversation, but not the eos token."""
        marks, _ = self._run(before)
        return {*marks} - {str(self._tokenizer.eos_token)}

    def _ends_a_users_turn(self, mark: str, openers: set[str]) -> bool:
        _, _, tail = self._render(_ASKED, add_generation_prompt=True).partition(QUESTION)
        return mark not in openers and self._run(tail)[0][:1] == [mark]

    def _end_of_call(self) -> str:
        """Return the special token that ends a conversation whose last turn calls a tool, or an empty text.

        A token such as GLM's </tool_call>, which is not special, ends a call, and another one may follow.
        """
        try:
            text = self._render([{"role": "assistant", "content": "", "tool_calls": [_CALL]}])  # type: ignore[typeddict-item]
        except RENDER_ERRORS:
            return ""
        _, name, tail = text.rpartition(_CALL["function"]["name"])
        ends = [match for match in self._mark.finditer(tail) if not tail[match.end() :].strip()] if name else []
        return ends[-1].group() if ends and ends[-1].group() in self._special else ""

    def _run(self, text: str) -> tuple[list[str], str]:
        """Split a text after the tokens at its beginning, which only white space may separate. Return (tokens, rest)."""
        marks, end = [], 0
        for match in self._mark.finditer(text):
            if text[end : match.start()].strip():
                break
            marks.append(match.group())
            end = match.end()
        return marks, text[end:]

    def _begin(self, text: str, count: int) -> str:
        """Return the beginning of a text up to the end of its first `count` tokens."""
        ends = [match.end() for match in self._mark.finditer(text)]
        return text[: ends[count - 1]] if count else ""


def _is_special(token: Any) -> bool:
    return token.special


def _common_beginning(first: list[str], second: list[str]) -> list[str]:
    """Return the common beginning of two lists."""
    return [item for item, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]
