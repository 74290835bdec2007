"""Tokenize text that somebody else has written, so that none of it becomes a mark of the conversation.

A tokenizer reads `<|im_end|>` as the one token that ends a turn, whoever has written it: a tool whose output has it would speak
in everybody's name. Here such text is taken apart behind the first character of each mark, and its pieces are tokenised one by
one: the same text, spelled out.

Leaves out: marks of one character, which cannot be taken apart; marks that only the tokenizer's normalizer makes of other
characters.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT_HERE = "\ue000"  # for private use: no text's own
UNKNOWN = "\ufffd"


class SpecialTokenEscaper:
    """The tokenizer's special tokens; and of its other added tokens (`</tool_response>`) those that are in `template`: they may
    be ordinary words, or a run of spaces, too.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "") -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        texts = {token.content for token in added if token.special or (token.content.strip() and token.content in template)}
        begins = [f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in sorted(texts) if len(text) > 1]
        self._begins = re.compile("|".join(begins) or r"(?!)")

    def escape(self, text: str) -> str:
        """Return the text with CUT_HERE in each mark, for `tokens`; a chat template may stand around it by then. What UTF-8 has
        not (half a surrogate pair, which tokenizers refuse) is a question mark.
        """
        text = text.encode("utf-8", "replace").decode().replace(CUT_HERE, UNKNOWN)
        return self._begins.sub(rf"\g<0>{CUT_HERE}", text)

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text. Marks that stand in one piece become their tokens."""
        pieces = text.split(CUT_HERE)
        return [token for piece in pieces for token in self._tokenizer(piece, add_special_tokens=False).input_ids]
