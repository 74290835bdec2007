"""Tokenize untrusted text, such as a tool's output, so that none of it becomes a special token.

A tokenizer turns `<|im_end|>` into the token that ends a turn, whoever wrote it. So a tool could end its turn and write another
one, of any role. We split the text after the first character of each special token, and tokenize the pieces one by one: the
tokens have the same text, but none of them is special.

Not handled: special tokens of one character, which cannot be split; those that only the tokenizer's normalizer makes from other
characters.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT_HERE = "\ue000"  # a private-use character, which texts do not contain
UNKNOWN = "\ufffd"


class SpecialTokenEscaper:
    """Escapes a tokenizer's special tokens, and its other added tokens that appear in `template`.

    Other added tokens, such as `</tool_response>`, may also be ordinary words or spaces, so only those of the template are
    escaped.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str = "") -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        texts = {token.content for token in added if token.special or (token.content.strip() and token.content in template)}
        begins = [f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in sorted(texts) if len(text) > 1]
        self._begins = re.compile("|".join(begins) or r"(?!)")

    def escape(self, text: str) -> str:
        """Return the text with CUT_HERE inside each special token, for `tokenize`.

        Between `escape` and `tokenize` a chat template may render the text. A character that UTF-8 cannot encode (half a
        surrogate pair, which tokenizers refuse) becomes a question mark.
        """
        text = text.encode("utf-8", "replace").decode().replace(CUT_HERE, UNKNOWN)
        return self._begins.sub(rf"\g<0>{CUT_HERE}", text)

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, split at CUT_HERE. Special tokens without a CUT_HERE become their tokens."""
        pieces = text.split(CUT_HERE)
        return [token for piece in pieces for token in self._tokenizer(piece, add_special_tokens=False).input_ids]
