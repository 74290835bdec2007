r"""Align the tokens that two tokenizers make of one text, by the text's bytes.

A chunk is the shortest piece of text that begins and ends between two tokens of both tokenizers:

    text       Hello wörld                places    a token ends at twice the number of bytes before its end
    student    Hel|lo| w|örld             3 chunks: Hello, " w", "örld"
    teacher    Hello| w|ör|ld

An odd place is within a character or between two bytes that form none. No chunk ends there, unless both tokenizers split a
character at the same byte. The chunks are those of TRL (ULDLoss._align_by_byte_offsets) and of
https://arxiv.org/abs/2606.09456, section 4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.data.plain_text import extents
from pipeline.recipe.problems import Problem

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OWN_TOKENS = 0.01  # share of a vocabulary that only one model may have, such as markers of turns
NO_CHUNK = -1
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def vocabulary_difference(student: Mapping[str, int], teacher: Mapping[str, int]) -> str:
    """Return how a teacher's vocabulary, token -> id, differs from the student's, apart from a few added tokens; "" if not."""
    moved = [token for token, number in student.items() if teacher.get(token, number) != number]
    absent = len(student.keys() - teacher.keys())
    if not moved and absent <= OWN_TOKENS * len(student):
        return ""
    if not moved:
        return f"it lacks {absent} of the policy's {len(student)} tokens"
    first = min(moved, key=lambda token: student[token])
    return f"{len(moved)} of the policy's {len(student)} tokens have another id in it or none, such as '{first}'"


def other_vocabulary(key: str, teacher: str, policy: str, difference: str) -> Problem:
    """Return the problem of a teacher whose distributions are compared with the policy's, token by token."""
    message = f"got {teacher}, whose vocabulary differs from policy.tokenizer.name {policy}: {difference}; expected a teacher"
    remedy = "loss_fn.kl_type=gold or uld, or algorithm=grpo with grpo.adv_estimator.name=opd, which compare texts"
    return Problem(key, "contradiction", f"{message} with the policy's tokenizer. Try {remedy}")


class TokenBytes:
    """Gives the bytes of text that tokens stand for, of tokenizers with byte-level or sentencepiece tokens, or with letters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the decoder of a tokenizer. Raises ValueError if its tokens have no bytes of their own."""
        self._tokenizer = tokenizer
        self._added = {id: token.content for id, token in tokenizer.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}
        steps = list(_steps(tokenizer.decoder and json.loads(tokenizer.decoder.__getstate__())))
        kinds = {step["type"] for step in steps}
        if not kinds or kinds - {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}:
            kind = ", ".join(sorted(kinds)) or "none"
            raise ValueError(f"got a tokenizer with the decoder {kind}; expected one of byte-level or sentencepiece tokens")
        self._letters = _bytes_of_letters() if "ByteLevel" in kinds else {}
        self._falls_back = "ByteFallback" in kinds
        replaced = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
        spaces = [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
        self._replaced = [(old, new) for old, new in (*replaced, *spaces) if old]

    def of(self, tokens: Iterable[int]) -> list[bytes]:
        """Return the bytes of each token."""
        return [self._of_token(int(token)) for token in tokens]

    def _of_token(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> bytes:
        if (added := self._added.get(token)) is not None:
            return added.encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:  # a row of the embedding without a token
            return b""
        if self._letters:
            return b"".join(self._letters.get(letter) or letter.encode() for letter in piece)
        if self._falls_back and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        for old, new in self._replaced:
            piece = piece.replace(old, new)
        return piece.encode()


def _steps(decoder: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _bytes_of_letters() -> dict[str, bytes]:
    """Return the byte that each letter of a byte-level token stands for (GPT-2's table)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in kept]
    return {chr(byte): bytes([byte]) for byte in kept} | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}


@dataclass(frozen=True)
class SpelledText:
    """The text that tokens spell."""

    text: str  # with U+FFFD for bytes that form no character; without such bytes at its end
    ends: np.ndarray  # [N] int64: the place where each token ends
    broken: list[tuple[int, int]]  # places of each U+FFFD that stands for such bytes


def spell(pieces: Sequence[bytes]) -> SpelledText:
    """Return the text of tokens with these bytes."""
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    whole, text, broken, at = b"".join(pieces), [], [], 0
    places = np.zeros(len(whole) + 1, np.int64)  # of the gaps between bytes
    place = 0
    while at < len(whole):
        try:
            run, until, bad = whole[at:].decode(), len(whole), len(whole)
        except UnicodeDecodeError as error:
            until, bad = at + error.start, at + error.end
            run = whole[at:until].decode()
        text.append(run)
        places[at : until + 1] = place + 2 * np.arange(until - at + 1)
        place += 2 * (until - at)
        if bad > until:
            places[until + 1 : bad + 1] = place + 1  # within the character that stands for these bytes
            if bad < len(whole):
                broken.append((place, place + 6))
                text.append("\ufffd")
                place += 6
                places[bad] = place
        at = bad
    return SpelledText("".join(text), places[ends], broken)


def places_of_offsets(text: str, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the place where each token ends, `[N]` int64, from tokens' (begin, end) in characters of `text`.

    Of several tokens of one character only the last one ends with it.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    sizes = 1 + sum((codes > most).astype(np.int64) for most in (0x7F, 0x7FF, 0xFFFF))  # bytes in UTF-8
    bytes_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
    begins, ends = extents(list(offsets), len(text))
    follows = np.concatenate([begins[1:], np.full(1, len(text))])[: len(ends)]
    within = follows < ends
    return 2 * bytes_before[np.where(within, follows, ends)] + within


def chunk_numbers(ends: np.ndarray, other: np.ndarray, broken: Sequence[tuple[int, int]] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of the chunk that each token of both tokenizers belongs to, `[N]` and `[M]` int64.

    ends, other: the places where the tokens of each tokenizer end. broken: places (begin, end) of text that is not compared.
    NO_CHUNK for tokens after the last common end and for tokens of `broken`. A token without text belongs to the chunk before.
    """
    common = np.intersect1d(ends, other)
    common = common[common > 0]
    begins = np.concatenate([np.zeros(1, np.int64), common])[: len(common)]
    compared = np.ones(len(common) + 1, bool)
    compared[-1] = False
    for begin, end in broken:
        compared[:-1] &= (common <= begin) | (begins >= end)
    numbers = [np.searchsorted(common, places) for places in (ends, other)]
    first, second = (np.where(compared[of_side], of_side, NO_CHUNK) for of_side in numbers)
    return first, second
