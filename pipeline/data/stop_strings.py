r"""Find stop strings: texts that end a completion at the token that completes the text.

We search the decoded text of the completion's tokens, with special tokens and without the prompt. A stop string may begin and
end within a token. The completion keeps all its tokens, but judges and users only get its text before the stop string, which
`text_before_stop` returns.

    tokens of a completion    The| answer| is| 4|.\n|\nQ        stop strings    ("\n\n", "Question:")
    its text                  The answer is 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pipeline.config import TokenizerConfig
from pipeline.data.chat import load_tokenizer
from pipeline.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"  # for bytes that are no whole character
MARGIN = 8  # tokens before a window in which a string may begin: those of a character, and a leading space


@dataclass(frozen=True, slots=True)
class FoundStop:
    """A completed stop string."""

    length: int  # tokens up to and including the one that completes it
    string: str  # of several, the one that begins first


class StopStrings:
    """Finds stop strings while tokens are drawn. The tokenizer is loaded on the first use."""

    def __init__(self, tokenizer: TokenizerConfig) -> None:
        self._config = tokenizer
        self._texts: dict[int, str] = {}  # of single tokens

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._config)

    def find(self, tokens: Sequence[int], new: int, stop: Sequence[str]) -> FoundStop | None:
        """Return the first stop string that the last `new` tokens complete; None if they complete none.

        tokens: all tokens of a completion. The tokens before the last `new` must complete no stop string. To keep the time
        independent of the completion's length, decode only if a new token may complete a stop string, and then only as many
        tokens as the longest stop string can span.
        """
        begin = len(tokens) - new
        if not any(self._may_complete(tokens[at], stop) for at in range(begin, len(tokens))):
            return None
        first = self._window(tokens, begin, max(len(string.encode(errors="surrogatepass")) for string in stop))
        for length in range(begin + 1, len(tokens) + 1):
            if first_stop(self._decode(tokens[first:length]), stop):
                match = first_stop(self._decode(tokens[:length]), stop)
                if match:
                    return FoundStop(length, match[1])
        return None

    def _may_complete(self, token: int, stop: Sequence[str]) -> bool:
        """Return whether a token may bring the last character of a stop string.

        A decoder may move spaces to another token, and a token may have only some bytes of a character.
        """
        text = self._text(token)
        return REPLACEMENT in text or any(string[-1] == " " or string[-1] in text for string in stop)

    def _window(self, tokens: Sequence[int], begin: int, most_bytes: int) -> int:
        """Return the position from which to decode, so that the text has all of a stop string that ends in tokens[begin:].

        most_bytes: the UTF-8 bytes of the longest stop string.
        """
        budget = most_bytes + MARGIN
        while begin and budget:
            begin -= 1
            budget -= bool(self._text(tokens[begin]))
        return begin

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._decode([token])
        return self._texts[token]

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """Return (position, string) of the stop string that begins first in a text; None if it has none."""
    matches = [(at, string) for string in stop if (at := text.find(string)) >= 0]
    return min(matches, key=lambda match: match[0]) if matches else None


def rollout_text(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> str:
    """Return the text of all turns and of the environment's replies between them, up to the last turn's stop string."""
    if not rollout.turns:
        return ""
    *before, last = rollout.turns
    head = str(tokenizer.decode(Rollout(tuple(before), 0.0).tokens, skip_special_tokens=True)) if before else ""
    return head + text_before_stop(tokenizer, last.completion.tokens.tolist(), "" if last.thinking else last.completion.stop)


def answer_text(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> str:
    """Return the text of the last turn up to its stop string; "" if this turn is still thinking or there are no turns."""
    if not rollout.turns or rollout.turns[-1].thinking:
        return ""
    last = rollout.turns[-1].completion
    return text_before_stop(tokenizer, last.tokens.tolist(), last.stop)


def text_before_stop(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], stop: str) -> str:
    """Return a completion's text without special tokens, up to its stop string. stop: `Completion.stop`."""
    tokens = list(tokens)
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    if not stop:
        return text
    if (at := text.find(stop)) >= 0:
        return text[:at]
    before, _, _ = str(tokenizer.decode(tokens)).partition(stop)  # the string has a special token
    count = next(n for n in range(len(tokens) - 1, -1, -1) if before.startswith(str(tokenizer.decode(tokens[:n]))))
    text = str(tokenizer.decode(tokens[:count], skip_special_tokens=True))
    special = tokens[count] in {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return text if special else text + before[len(str(tokenizer.decode(tokens[:count]))) :]
