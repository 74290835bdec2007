"""Stop strings against hand-made cases, and against decoding the whole text after each token."""

import random

import pytest

from pipeline.config import TokenizerConfig
from pipeline.data.stop_strings import FoundStop, StopStrings, first_stop, text_before_stop
from tests.data import made_tokenizers as made
from tests.data.made_tokenizers import END, MARK, THOUGHT

E_ACUTE, SUN, SMILE = "é".encode(), "日".encode(), "😀".encode()

# (tokens, stop strings, tokens that are kept: None if none is completed, the text before the string)
CASES = {
    "one token": (["The", "STOP", "a"], ["STOP"], 2, "The"),
    "within a token": (["The", "aab", "a"], ["a"], 2, "The"),
    "at the end of a token": (["aab", "a"], ["b"], 1, "aa"),
    "over two tokens": (["a", "ST", "TOP", "a"], ["STTOP"], 3, "a"),
    "over many tokens": (["a", "<|", "end", "|>", "b"], ["<|end|>"], 4, "a"),
    "in the middle of both tokens": (["aab", "ba", "b"], ["bb"], 2, "aa"),
    "first token": (["STOP", "a"], ["STOP"], 1, ""),
    "begins in the first token": (["ab", "a"], ["b"], 1, "a"),
    "first of two strings": (["a", "Question", ":", "\n\n"], ["\n\n", "Question:"], 3, "a"),
    "two strings by one token, the one that begins first": (["The", "aab"], ["b", "ab"], 2, "Thea"),
    "two strings by one token, a longer one begins first": (["The", ".\n", "a"], ["\n", ".\n"], 2, "The"),
    "one string in another": (["a", "STOP"], ["STOP", "ST"], 2, "a"),
    "the shorter of two comes with an earlier token": (["a", "ST", "TOP"], ["STTOP", "ST"], 2, "a"),
    "almost": (["ST", "a", "TOP"], ["STTOP"], None, ""),
    "overlapping beginning": (["a", "a", "a", "b", "a"], ["aab"], 4, "a"),
    "two line breaks of two tokens": (["4", ".", "\n", "\n", "Q"], ["\n\n"], 4, "4."),
    "two line breaks, one in a token": (["4", ".\n", "\n", "Q"], ["\n\n"], 3, "4."),
    "spaces": (["4", " ", " ", "Q"], ["  "], 3, "4"),
    "string ends in a space": (["Q", ":", " ", "4"], [": "], 3, "Q"),
    "space of the next word": (["a", " answer"], ["a "], 2, ""),
    "character of three bytes in one token": (["a", "日", "b"], ["日"], 2, "a"),
    "character of three bytes in three tokens": (["a", SUN[:1], SUN[1:2], SUN[2:], "b"], ["日"], 4, "a"),
    "character of two tokens": (["a", SUN[:2], SUN[2:], "b"], ["a日"], 3, ""),
    "bytes of two characters in a token": ([SUN[:1], "日本".encode()[1:5], "本".encode()[2:], "b"], ["日本"], 3, ""),
    "first byte of the next character is in the token": ([SUN[:1], "日本".encode()[1:5], "本".encode()[2:]], ["日"], 2, ""),
    "emoji in two tokens": (["b", SMILE[:2], SMILE[2:], "a"], ["😀"], 3, "b"),
    "half a character before the string": ([b"a\xc3", "STOP"], ["STOP"], 2, "a\ufffd"),
    "another character with the same first byte": (["a", b"\xc3", b"\xa8", "b"], ["é"], None, ""),
    "letter and half of the next": ([b"a\xc3", b"\xa9b", "a"], ["éb"], 2, "a"),
    "special token": (["a", MARK, "b"], [MARK], 2, "a"),
    "special token and text": (["a", "\n", MARK, "b"], ["\n" + MARK], 3, "a"),
    "part of a special token": (["a", MARK, "b"], ["mark"], 2, "a"),
    "text before a special token, within a token": (["aab", MARK, "b"], ["b" + MARK], 2, "aa"),
    "special token before the string is not shown": ([MARK, "a", "STOP"], ["STOP"], 3, "a"),
    "special token within the string": (["\n", MARK, "\n"], ["\n\n"], None, ""),
    "added token": (["a", THOUGHT, "4"], [THOUGHT], 2, "a"),
    "added token in pieces": (["a", "</", "think", ">", "4"], [THOUGHT], 4, "a"),
    "with the end": (["a", "ST", "TOP", END], ["STTOP"], 3, "a"),
    "only together with the end": (["a", "b", END], ["b" + END], 3, "a"),
    "nothing": (["The", " answer", END], ["STOP"], None, ""),
}


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = tmp_path_factory.mktemp("byte_level")
    tokenizer = made.byte_level()
    tokenizer.save_pretrained(folder)
    return tokenizer, StopStrings(TokenizerConfig(name=str(folder)))


def by_steps(finder, tokens, stop, at_once=1):
    """Return what is found if `at_once` tokens come with each step."""
    for start in range(0, len(tokens), at_once):
        seen = tokens[: start + at_once]
        if found := finder.find(seen, len(seen) - start, stop):
            return found
    return None


@pytest.mark.parametrize("name", CASES)
def test_case(name, byte_level):
    tokenizer, finder = byte_level
    pieces, stop, kept, text = CASES[name]
    tokens = made.ids(tokenizer, pieces)
    for at_once in (1, 2, 3, len(tokens)):
        found = by_steps(finder, tokens, stop, at_once)
        assert (found.length if found else None) == kept
        if found:
            assert text_before_stop(tokenizer, tokens[:kept], found.string) == text
    assert text_before_stop(tokenizer, tokens, "") == tokenizer.decode(tokens, skip_special_tokens=True)


def expected(tokenizer, tokens, stop):
    for length in range(1, len(tokens) + 1):
        if found := first_stop(tokenizer.decode(tokens[:length]), stop):
            return FoundStop(length, found[1])
    return None


@pytest.mark.parametrize("kind", [made.byte_level, made.metaspace, made.word_piece, made.words])
def test_equals_decoding_everything_after_each_token(kind, tmp_path):
    tokenizer, drawn = kind(), random.Random(0)
    tokenizer.save_pretrained(tmp_path)
    finder, hits = StopStrings(TokenizerConfig(name=str(tmp_path))), 0
    used = [i for i in range(len(tokenizer)) if not (kind is made.metaspace and 1 <= i <= 250 and i % 8)]
    for _ in range(300):
        tokens = drawn.choices(used, k=40)
        text = tokenizer.decode(tokens)
        begins = [drawn.randrange(len(text)) for _ in range(drawn.randint(1, 3))]
        stop = [text[begin : begin + drawn.randint(1, 12)] for begin in begins]
        stop = [string for string in stop if "\ufffd" not in string] or ["STOP"]
        found = by_steps(finder, tokens, stop, drawn.choice([1, 1, 4]))
        assert found == expected(tokenizer, tokens, stop)
        hits += found is not None
    assert hits > 200


def test_the_tokenizer_is_loaded_only_when_it_is_needed(tmp_path):
    StopStrings(TokenizerConfig(name=str(tmp_path / "absent")))


def test_a_step_does_not_decode_the_whole_completion(byte_level, monkeypatch):
    tokenizer, finder = byte_level
    tokens = made.ids(tokenizer, ["a", "b", "\n"] * 2000)
    seen = []
    decode = StopStrings._decode
    monkeypatch.setattr(StopStrings, "_decode", lambda self, part: seen.append(len(part)) or decode(self, part))
    assert finder.find(tokens, 1, ["\n\n", "Question:"]) is None
    assert finder.find(tokens[:-1], 1, ["\n\n", "Question:"]) is None  # `b` ends none
    assert max(seen) < 32 and len(seen) < 30
