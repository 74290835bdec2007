"""Tokenize plain text, which a model continues or learns, without a chat template.

A tokenizer's post-processor may put special tokens around every text: <s> before it (Llama), or an end-of-sequence token after
it (T5, some base models). We keep the tokens before the text, which begin a document. We omit the token after the text, which
would end the document before the answer. `with_end` appends the end-of-sequence token to a complete text.
"""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PROBE = "a"


class PlainText:
    """Tokenizes plain texts with one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def begin(self) -> list[int]:
        """The special tokens before every text; empty if the tokenizer adds none."""
        framed, bare = self._tokenizer(PROBE).input_ids, self._bare(PROBE)
        at = next((at for at in range(len(framed) - len(bare) + 1) if framed[at : at + len(bare)] == bare), 0)
        return list(framed[:at])

    @cached_property
    def end(self) -> list[int]:
        """The end-of-sequence token; empty, with a warning in the log, if the tokenizer has none."""
        end: Any = self._tokenizer.eos_token_id  # typed as for a batch of ids
        if end is None:
            name = self._tokenizer.name_or_path
            logger.warning("the tokenizer %s has no end-of-sequence token: texts are learned without an end", name)
        return [] if end is None else [end]

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of an incomplete text: the special tokens before every text, then those of the text."""
        return [*self.begin, *self._bare(text)]

    def with_end(self, tokens: list[int]) -> list[int]:
        """Return `tokens`, of a complete text, with the end-of-sequence token appended unless they already end in it."""
        return tokens if tokens[-1:] == self.end else [*tokens, *self.end]

    def _bare(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)


def tokens_with_text(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: list[tuple[int, int]]
) -> tuple[list[int], np.ndarray]:
    """Return the tokens of a text, without special tokens around it, and a mask `[L]` bool of the tokens with text of a span.

    spans: (begin, end) in characters. The mask includes tokens that are only partly in a span.
    """
    if not tokenizer.is_fast:
        return _by_prefixes(tokenizer, text, spans)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    tokens, (begins, ends) = list(encoded["input_ids"]), extents(encoded["offset_mapping"], len(text))
    mask = np.zeros(len(tokens), dtype=bool)
    for begin, end in spans:
        mask |= (ends > begin) & (begins < end)
    return tokens, mask


def extents(offsets: list[tuple[int, int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the begin and the end of each token in a text of `length` characters, `[L]` int64 each.

    Offsets may omit white space at the ends of a token (GPT-2's `trim_offsets`). We count such white space to the token after
    the gap, or, if a token is only white space, to this token.
    """
    begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
    before = np.concatenate([np.zeros(1, np.int64), np.maximum.accumulate(ends)[:-1]])[: len(ends)]
    after = np.concatenate([begins[1:], np.full(1, length)])[: len(ends)]
    begins = np.minimum(begins, before)
    return begins, np.where(ends > begins, ends, np.maximum(ends, after))


def _by_prefixes(tokenizer: PreTrainedTokenizerBase, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], np.ndarray]:
    """Return what `tokens_with_text` returns, for a tokenizer without offsets.

    To find the token at a border of a span, tokenize the text before the border, and compare with the tokens of the whole text:
    the first token that differs is at the border.
    """
    tokens = list(tokenizer(text, add_special_tokens=False).input_ids)

    def border(at: int) -> tuple[int, bool]:
        before = tokenizer(text[:at], add_special_tokens=False).input_ids
        size = next((n for n, (a, b) in enumerate(zip(before, tokens, strict=False)) if a != b), min(len(before), len(tokens)))
        return size, size < len(before)

    mask = np.zeros(len(tokens), dtype=bool)
    for begin, end in spans:
        (first, _), (last, merged) = border(begin), border(end)
        mask[first : last + merged] = True
    return tokens, mask
