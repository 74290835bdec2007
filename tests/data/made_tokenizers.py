"""Tokenizers of a few tokens, one for each way of decoding, with multi-byte characters that tokens split."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers
from tokenizers.models import BPE, WordLevel, WordPiece
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from pipeline.config import RECIPES

END, MARK, THOUGHT = "<|end|>", "<|mark|>", "</think>"
WORDS = ["Question", ":", "Q", "uestion", ".", "\n", "\n\n", " ", "  ", "The", " answer", " is", "4", " 4", ".\n", "#", "##"]
WORDS += ["###", "日", "本", "é", "😀", "a", "b", "ab", "aab", "ba", "<|", "end", "|>", "S", "ST", "TOP", "STOP", "</", "think"]
WORDS += [">"]


def _letters() -> dict[int, str]:
    """Return the letter that stands for each byte in byte-level tokens."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def byte_level() -> PreTrainedTokenizerFast:
    """Return a tokenizer like GPT-2's, of 96 tokens: words, single bytes of their characters, and pairs of bytes."""
    letters = _letters()
    pieces = [word.encode() for word in WORDS]
    pieces += [bytes([byte]) for word in ("日本", "é", "😀", "è") for byte in word.encode()]
    pieces += [b"a\xc3", b"\xa9b", "日".encode()[:2], "本".encode()[1:], "😀".encode()[:2], "😀".encode()[2:]]
    pieces += ["日本".encode()[1:5]]
    pieces += [bytes([byte]) for byte in b"cdefghijklmnopqrstuvwxyzABCDEFGHIJ"]
    names = [END, MARK, THOUGHT, *dict.fromkeys("".join(letters[byte] for byte in piece) for piece in pieces)]
    vocab = {name: i for i, name in enumerate(["w0", *names][:96])}
    vocab = {"w0": 0, END: 1, **{name: i for name, i in vocab.items() if i > 1}}
    tokenizer = Tokenizer(BPE(vocab, [], unk_token="w0"))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return _with_special(tokenizer)


def metaspace() -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's: a leading space is dropped, and unknown characters are bytes such as <0xE6>."""
    names = ["w0", *(f"<0x{byte:02X}>" for byte in range(256)), *(word.replace(" ", "▁") for word in WORDS)]
    tokenizer = Tokenizer(BPE({name: i for i, name in enumerate(dict.fromkeys(names))}, [], unk_token="w0", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_special(tokenizer)


@functools.cache
def trained(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that was trained on a few words: "bytes, N tokens" is like GPT-2's, "sentencepiece" like Llama 2's,
    "letters" like that of the tiny recipes. "normalized" after the number: in a normal form of Unicode, and without any #.

    A sentencepiece tokenizer puts a space before a text, and writes unknown characters as bytes.
    """
    corpus = ["the thing in the nation bade a dab, caddie!", "Kreuzung der Nationen: die Größe über 1234", "日本 😀 été\n"]
    named, _, size = kind.partition(", ")
    if named == "sentencepiece":
        tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        alphabet = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        # A sentence of its characters is too short for all bytes, so that these are part of the vocabulary beforehand.
        trainer = BpeTrainer(vocab_size=400, special_tokens=alphabet, show_progress=False, limit_alphabet=30)
        tokenizer.train_from_iterator(corpus, trainer)
        vocab = json.loads(tokenizer.to_str())
        vocab["added_tokens"] = [token for token in vocab["added_tokens"] if token["content"] == "<unk>"]
        tokenizer = Tokenizer.from_str(json.dumps(vocab))
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
        return _with_special(tokenizer, unk_token="<unk>")
    if named == "letters":
        names = ["<unk>", *dict.fromkeys("".join(corpus))]
        tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer, tokenizer.decoder = Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
        return _with_special(tokenizer, unk_token="<unk>")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=int(size.split()[0]), initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    if size.endswith("normalized"):
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("#", "")])
    return _with_special(tokenizer)


def word_piece() -> PreTrainedTokenizerFast:
    """Return a tokenizer like BERT's, which joins ## to the word before and removes spaces before punctuation."""
    names = ["w0", *(word.strip() for word in WORDS if word.strip() and "#" not in word), "##ab", "##estion", "##s"]
    tokenizer = Tokenizer(WordPiece({name: i for i, name in enumerate(dict.fromkeys(names))}, unk_token="w0"))
    tokenizer.decoder = decoders.WordPiece("##")
    return _with_special(tokenizer)


def words() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are words with spaces between them."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    return _with_special(tokenizer)


def _with_special(tokenizer: Tokenizer, **names: str) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False), AddedToken(MARK, special=True)])
    tokenizer.add_tokens([AddedToken(THOUGHT, special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, **names)


def ids(tokenizer: PreTrainedTokenizerFast, pieces: Sequence[str | bytes]) -> list[int]:
    """Return the tokens of a byte-level tokenizer, each given as its text or its bytes."""
    letters, vocab = _letters(), tokenizer.get_vocab()
    names = [piece if piece in (END, MARK, THOUGHT) else "".join(letters[byte] for byte in _bytes(piece)) for piece in pieces]
    return [vocab[str(name)] for name in names]


def _bytes(piece: str | bytes) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece


def with_marks(marks: Sequence[str], template: str | None = None) -> PreTrainedTokenizerFast:
    """Return the tokenizer of the tiny recipes with more special tokens, and a chat template."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(RECIPES / "tiny")
    tokenizer.add_tokens(list(marks), special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer
