"""Encode what an environment tells the policy as the tokens between two of its turns.

With a chat template these are what the template writes from the end of an assistant's turn to where the next one begins:

    ChatML    \\n<|im_start|>user\\n{content}<|im_end|>\\n<|im_start|>assistant\\n
    Mistral   [INST] {content}[/INST]

and before them what ends a turn (<|im_end|>, </s>), if the policy did not draw that itself. They are cut out of a
conversation in which a stand-in says what the policy said: its own tokens are never tokenised anew, and a template that leaves
out earlier reasoning changes nothing about them. Without a chat template they are the text's tokens.

Where the template has no role `tool`, such messages get the role `user`, and the log notes it once. Special tokens in the
content, which a tool may have from any source, are spelled out (`pipeline/data/special_tokens.py`), so that the content cannot
end its turn and begin another.

Leaves out: tool calls as structures (to the template, what the policy says is text), pictures.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import jinja2
import numpy as np

from pipeline.config import Message, TokenizerConfig
from pipeline.data.special_tokens import SpecialTokenEscaper

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STAND_IN, TOLD = "Understood7", "Answered7"  # no words of any template's own
CUT = " [cut]"  # at the end of an observation that was longer than its room


class Observations:
    """Used by one thread at a time. Raises ValueError if the chat template cannot render a second turn of a user's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: TokenizerConfig, chat: bool) -> None:
        """chat: whether prompts are rendered with the chat template (data.apply_chat_template)."""
        self._tokenizer, self._chat = tokenizer, chat
        self._escaper = SpecialTokenEscaper(tokenizer, str(tokenizer.chat_template) if chat else "")
        self._template_kwargs = config.chat_template_kwargs or {}
        self._roles: dict[str, str] = {}  # what is said as what
        if chat:
            self._role("user")
        self._end_of_turn = self._mark_after_turn() if chat else ""

    def ends_turn(self, token: int) -> bool:
        """Return whether this is the token that the chat template writes at the end of the policy's turn."""
        return bool(self._end_of_turn) and token == self._tokenizer.convert_tokens_to_ids(self._end_of_turn.strip())

    def tokens(self, message: Message, ended: bool) -> np.ndarray:
        """Return all tokens, `[O]` int32, that follow the policy's turn until it speaks again.

        message: {"role", "content"}; without a chat template the role does not matter. ended: whether the policy's last token
        `ends_turn`. Raises ValueError for a role that the template cannot render there.
        """
        content = self._escaper.escape(message["content"])
        if not self._chat:
            return np.asarray(self._escaper.tokenize(content), np.int32)
        text, begin = self._conversation({**message, "role": self._role(message["role"]), "content": content})
        if ended:
            begin += len(self._end_of_turn)
        before, whole = self._escaper.tokenize(text[:begin]), self._escaper.tokenize(text)
        if whole[: len(before)] != before:  # a token of the template's reaches over the end of the turn, which has no mark
            before, whole = [], self._escaper.tokenize(text[begin:])
        return np.asarray(whole[len(before) :], np.int32)

    def within(self, message: Message, ended: bool, room: int) -> np.ndarray | None:
        """Return what `tokens` does, but at most `room` of them: of a longer content the beginning, and a mark that it was cut.
        None if there is no room for any of it.
        """
        whole = self.tokens(message, ended)
        if len(whole) <= room:
            return whole
        content = self._escaper.tokenize(self._escaper.escape(message["content"]))
        keep = len(content) - (len(whole) - room)
        while keep > 0:
            told = self.tokens({**message, "content": self._tokenizer.decode(content[:keep]) + CUT}, ended)
            if len(told) <= room:
                return told
            keep -= len(told) - room
        return None

    def _role(self, role: str) -> str:
        """Return the role as which the template tells messages of a role."""
        if role not in self._roles:
            told_as, problem = role, self._problem(role)
            if problem and role == "tool":
                told_as, problem = "user", None
                print("policy.tokenizer.chat_template has no role tool: what tools answer is told as user", flush=True)
            if problem:
                raise ValueError(
                    f"policy.tokenizer.chat_template: an environment's {role} after an assistant's turn: {problem}"
                )
            self._roles[role] = told_as
        return self._roles[role]

    def _problem(self, role: str) -> str | None:
        """Return why the template cannot tell it."""
        try:
            text, begin = self._conversation({"role": role, "content": TOLD})
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            return str(error)
        return None if TOLD in text[begin:] else "it renders nothing of what is said"

    def _conversation(self, *told: Message) -> tuple[str, int]:
        """Return a conversation in which the policy is told something, up to where it speaks again, and how far the policy's
        own words reach.
        """
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": STAND_IN}, *told]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=bool(told), **self._template_kwargs
        )
        if (begin := text.find(STAND_IN)) < 0:
            raise ValueError("it renders nothing of what the assistant has said")
        return text, begin + len(STAND_IN)

    def _mark_after_turn(self) -> str:
        """Return the special token that the template writes after what the assistant says, whether or not more follows; "" if
        none.
        """
        tails = [text[begin:] for text, begin in (self._conversation(), self._conversation({"role": "user", "content": "?"}))]
        special = [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]
        longest_first = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
        mark = re.compile(rf"\s*(?:{longest_first})" if special else r"(?!)")
        found = [match.group() if (match := mark.match(tail)) else "" for tail in tails]
        return found[0] if found[0] == found[1] else ""
