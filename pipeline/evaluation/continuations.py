"""Tokenize contexts with their continuations for scoring, token for token as lm-evaluation-harness does for causal models.

If the context alone has n tokens, the continuation's tokens are those of the whole text after the first n. White space at the
end of the context moves to the continuation, because most tokenizers join a space with the word after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.data.plain_text import PlainText
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.types import LikelihoodRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TokenPair:
    """The tokens of a context and of its continuation."""

    context: np.ndarray  # [C] int32, at least one
    continuation: np.ndarray  # [K] int32

    def __len__(self) -> int:
        return len(self.context) + len(self.continuation)

    def request(self, id: str, longest: int) -> LikelihoodRequest:
        """Return the request that scores the continuation. A text of more than `longest` tokens loses its first ones."""
        tokens = np.concatenate([self.context, self.continuation])[-longest:]
        return LikelihoodRequest(id, tokens, len(tokens) - len(self.continuation))


class ContinuationEncoder:
    """Tokenizes texts with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises RecipeError for a tokenizer with neither a beginning-of-sequence nor an end-of-sequence token."""
        self._tokenizer, self.plain = tokenizer, PlainText(tokenizer)
        ids: list[Any] = [tokenizer.bos_token_id, tokenizer.eos_token_id]
        if ids == [None, None]:
            message = f"got {tokenizer.name_or_path}, which has neither a beginning-of-sequence nor an end-of-sequence token;"
            raise RecipeError(
                Problem(
                    "policy.tokenizer.name", "unsupported", f"{message} expected one of them, as the context of a whole text"
                )
            )
        self.prefix: int = ids[0] if ids[0] is not None else ids[1]
        """The token that is the context of a text without a context."""
        self._prefix_text = str(tokenizer.decode([self.prefix]))

    def pairs(self, texts: Sequence[tuple[str, str]]) -> list[TokenPair]:
        """Return the tokens of each (context, continuation). A continuation that adds no token has an empty array."""
        moved = [_move_spaces(context, continuation) for context, continuation in texts]
        wholes = self.encode([context + continuation for context, continuation in moved if context])
        contexts = list(dict.fromkeys(context for context, _ in moved if context))
        by_context = dict(zip(contexts, self.encode(contexts), strict=True))
        encoded = iter(wholes)
        pairs = []
        for context, continuation in moved:
            if not context:
                pairs.append(self._without_context(continuation))
                continue
            begin = by_context[context]
            pairs.append(TokenPair(begin, next(encoded)[len(begin) :]))
        return pairs

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return each text's tokens [T] int32. The tokenizer's special tokens come first, unless the text begins with them."""
        if not texts:
            return []
        token_ids = self._tokenizer(list(texts), add_special_tokens=False).input_ids
        begins = [[] if text.startswith(self._prefix_text) else self.plain.begin for text in texts]
        return [np.asarray([*begin, *ids], np.int32) for begin, ids in zip(begins, token_ids, strict=True)]

    def _without_context(self, continuation: str) -> TokenPair:
        tokens = np.asarray(self._tokenizer(continuation, add_special_tokens=False).input_ids, np.int32)
        if len(tokens) and tokens[0] == self.prefix:
            return TokenPair(tokens[:1], tokens[1:])
        return TokenPair(np.array([self.prefix], np.int32), tokens)


def rolling_windows(tokens: np.ndarray, prefix: int, longest: int) -> list[TokenPair]:
    """Return windows of at most `longest` tokens that together score each token of a text once.

    The first window begins with `prefix`. The context of a window is the single token before its scored tokens; in the last
    window it is as many tokens as fit.
    """
    predicted = longest - 1
    text = np.concatenate([np.array([prefix], np.int32), tokens])
    windows = []
    for start in range(1, len(text), predicted):
        end = min(start + predicted, len(text))
        first = max(0, end - longest)
        windows.append(TokenPair(text[first:start], text[start:end]))
    return windows


def _move_spaces(context: str, continuation: str) -> tuple[str, str]:
    stripped = context.rstrip()
    return stripped, context[len(stripped) :] + continuation
