"""Chunks: both sides spell the same text, no shorter chunks exist, and no text is lost; by bytes and by offsets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pipeline.data.token_alignment import NO_CHUNK, TokenBytes, chunk_numbers, places_of_offsets, spell
from tests.data.made_tokenizers import trained, word_piece

LETTERS = [*"abcdeé ü\n日本😀👍🏽", "the", " a", "  ", "ing", "tion"]


def texts(count: int) -> list[str]:
    draw = np.random.default_rng(0)
    return ["".join(draw.choice(LETTERS, draw.integers(1, 30))) for _ in range(count)]


def ends_of(tokenizer, text: str) -> tuple[list[bytes], np.ndarray]:
    """Return the bytes and the ends of a text's tokens, without the space that a sentencepiece tokenizer puts before it."""
    pieces = TokenBytes(tokenizer.backend_tokenizer).of(tokenizer(text, add_special_tokens=False).input_ids)
    if b"".join(pieces) == f" {text}".encode():
        pieces[0] = pieces[0][1:]
    return pieces, spell(pieces).ends


def spelled_by(pieces: list[bytes], chosen: np.ndarray) -> bytes:
    return b"".join(itertools.compress(pieces, chosen.tolist()))


@pytest.mark.parametrize("other", ["bytes, 400 tokens", "sentencepiece"])
def test_chunks_of_two_tokenizers(other: str) -> None:
    """Chunks are the runs between places where a token of each ends, found here pair by pair."""
    student, teacher = trained("bytes, 300 tokens"), trained(other)
    several = 0
    for text in texts(60):
        (ours, our_ends), (theirs, their_ends) = ends_of(student, text), ends_of(teacher, text)
        assert b"".join(ours).decode() == text == b"".join(theirs).decode()
        chunks = chunk_numbers(our_ends, their_ends)
        sides = zip((ours, theirs), chunks, strict=True)
        spelled = [[spelled_by(pieces, numbers == chunk) for chunk in range(len(theirs))] for pieces, numbers in sides]
        assert spelled[0] == spelled[1]
        assert b"".join(spelled[0]).decode() == text
        prefixes = [set(itertools.accumulate(map(len, pieces))) for pieces in (ours, theirs)]
        assert len(set(chunks[0].tolist())) == len(prefixes[0] & prefixes[1])
        several += any(np.bincount(chunks[0]) > 1)
    assert several > 20


def test_offsets_give_the_same_chunks_but_within_characters() -> None:
    student, teacher, compared = trained("bytes, 300 tokens"), trained("bytes, 400 tokens"), 0
    for text in texts(60):
        (_, our_ends), (_, their_ends) = ends_of(student, text), ends_of(teacher, text)
        offsets = teacher(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        rough, exact = chunk_numbers(our_ends, places_of_offsets(text, offsets)), chunk_numbers(our_ends, their_ends)
        borders = {2 * len(text[:n].encode()) for n in range(len(text) + 1)}
        merged = [set(our_ends[np.flatnonzero(np.diff(of_ours, append=-1))].tolist()) for of_ours, _ in (rough, exact)]
        assert merged[0] == merged[1] & borders, text
        compared += len(merged[0])
    assert compared > 100


def test_bytes_that_form_no_character_by_hand() -> None:
    r"""`\xff` becomes U+FFFD, which takes the places 2 to 8; the first two bytes of an emoji at the end are left out."""
    spelled = spell([b"a\xff", b"b\xe6\x97", b"\xa5", b"c\xf0", b"\x9f"])
    assert spelled.text == "a\ufffdb日c" and spelled.broken == [(2, 8)]
    assert spelled.ends.tolist() == [8, 14, 16, 19, 19]
    ours, theirs = chunk_numbers(spelled.ends, np.array([2, 8, 10, 16, 18]), spelled.broken)
    assert ours.tolist() == [NO_CHUNK, 1, 1, NO_CHUNK, NO_CHUNK]
    assert theirs.tolist() == [NO_CHUNK, NO_CHUNK, 1, 1, NO_CHUNK]


def test_tokens_without_text_belong_to_a_chunk() -> None:
    ours, theirs = chunk_numbers(np.array([0, 6, 6, 10]), np.array([6, 8, 10, 10]))
    assert ours.tolist() == [0, 0, 0, 1] and theirs.tolist() == [0, 1, 1, 1]


def test_a_tokenizer_without_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="WordPiece"):
        TokenBytes(word_piece().backend_tokenizer)
