"""Encode what a rollout function says to the policy, and decode what the policy says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.config import TokenizerConfig
from pipeline.data.observations import Observations
from pipeline.data.plain_text import PlainText
from pipeline.data.rendering import ChatTemplate
from pipeline.data.stop_strings import text_before_stop
from pipeline.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ConversationText:
    """The tokenizer and the chat template of a rollout function's episodes.

    observations: encodes replies to the policy; None if episodes have one turn.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, config: TokenizerConfig, chat: bool, observations: Observations | None
    ) -> None:
        self._tokenizer, self._observations, self._plain = tokenizer, observations, PlainText(tokenizer)
        self._template = ChatTemplate(tokenizer, config.chat_template_kwargs) if chat else None
        self.vocabulary = len(tokenizer)  # tokens

    def decoded(self, completion: Completion) -> str:
        """Return the text that is judged."""
        return text_before_stop(self._tokenizer, completion.tokens.tolist(), completion.stop)

    def context(self, context: Any) -> np.ndarray:
        """Return the tokens, `[P]` int32, of a new conversation: messages, a text, or tokens. Raises TypeError for others."""
        if isinstance(context, dict):
            context = [context]
        if isinstance(context, list) and context and all(isinstance(message, dict) for message in context):
            if self._template is None:
                raise TypeError("got messages, but data.apply_chat_template is false; expected a text or tokens")
            text = self._template.text(context, add_generation_prompt=True)
            return _int32(self._tokenizer(text, add_special_tokens=False).input_ids)
        if isinstance(context, str):
            if self._template is None:
                return _int32(self._plain.tokens(context))
            return self.context([{"role": "user", "content": context}])
        return self._tokens(context, "the prompt, a drawn turn, messages, a text or tokens")

    def reply(self, reply: Any, after: int, room: int) -> np.ndarray | None:
        """Return the tokens, `[O]` int32, of a reply after a turn whose last token is `after`; None if `room` is too little.

        reply: a text, a message, a list of messages, or tokens. The list may begin with the turn, as a message with its calls.
        """
        if isinstance(reply, str):
            reply = {"role": "user", "content": reply}
        messages = [reply] if isinstance(reply, dict) else reply
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            if self._observations is None:
                return np.zeros(0, np.int32)  # no further turn can be drawn
            turn = messages[0] if messages[0].get("tool_calls") else None
            return self._observations.within(messages[1:] if turn else messages, after, room, turn)
        tokens = self._tokens(reply, "a text, messages or tokens")
        return tokens if len(tokens) <= room else None

    def _tokens(self, value: Any, expected: str) -> np.ndarray:
        tokens = np.asarray(value) if isinstance(value, list | tuple | np.ndarray) else np.zeros(0, np.float32)
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise TypeError(f"got a {type(value).__name__}; expected {expected}")
        if len(wrong := tokens[(tokens < 0) | (tokens >= self.vocabulary)]):
            raise ValueError(f"got the token {wrong[0]}; expected 0 to {self.vocabulary - 1}, of the tokenizer")
        return _int32(tokens)

    def plain(self, text: str) -> np.ndarray:
        """Return the tokens, `[N]` int32, of a text alone."""
        return _int32(self._tokenizer(text, add_special_tokens=False).input_ids)


def _int32(tokens: Any) -> np.ndarray:
    return np.asarray(tokens, np.int32)
