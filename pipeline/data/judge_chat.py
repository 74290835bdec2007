"""Encode conversations for a judge: what others wrote in them cannot end a turn or begin one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.data.special_tokens import SpecialTokenEscaper
from pipeline.data.templates import check_template
from pipeline.recipe.problems import Problem, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class JudgeChat:
    """A judge's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any] | None, key: str) -> None:
        """Bind to a judge's tokenizer. options: variables of the chat template. key: the recipe's key of the template.

        Raises RecipeError if the tokenizer has no chat template, or one that leaves out the user's message.
        """
        if not tokenizer.chat_template:
            message = f"got null; expected a chat template, since the judge's tokenizer {tokenizer.name_or_path} has none"
            raise RecipeError(Problem(key, "missing-value", message))
        self._tokenizer, self._options = tokenizer, options or {}
        check_template(tokenizer, self._options, key)
        self._escaper = SpecialTokenEscaper(tokenizer, str(tokenizer.chat_template))

    def encode(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
        """Return the tokens of messages {"role", "content"} and the beginning of a reply, [P] int32.

        Special tokens in the contents stay text.
        """
        escaped = [{**message, "content": self._escaper.escape(message["content"])} for message in messages]
        options = {**self._options, "tokenize": False, "add_generation_prompt": True}
        rendered = self._tokenizer.apply_chat_template(escaped, **options)
        return np.asarray(self._escaper.tokenize(str(rendered)), np.int32)
