"""Special tokens around plain texts, tokens across a border, and tokens without context."""

import logging

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from pipeline.config import RECIPES, DataConfig, DatasetConfig, TokenizerConfig
from pipeline.data.chat import Encoder
from pipeline.data.plain_text import PlainText, _by_prefixes, tokens_with_text
from pipeline.data.preferences import encode_pair
from tests.data.test_chat import CHATML

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789+=?:<|_>"


def made(around: str = "$A", eos: str | None = "</s>", trim: bool = True) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that joins two newlines, and a space with the letter after it.

    around: of the post-processor, such as "<s> $A </s>".
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    pieces = ["<s>", "</s>", *sorted(alphabet), "ĊĊ", *(f"Ġ{letter}" for letter in LETTERS)]
    merges = [("Ċ", "Ċ"), *(("Ġ", letter) for letter in LETTERS)]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    special = [("<s>", 0), ("</s>", 1)]
    steps = [processors.ByteLevel(trim_offsets=trim), processors.TemplateProcessing(single=around, special_tokens=special)]
    tokenizer.post_processor = processors.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token="<s>" if "<s>" in around else None)


def encoder(tokenizer: PreTrainedTokenizerBase, chat: bool = False, **dataset) -> Encoder:
    return Encoder(tokenizer, TokenizerConfig(), DataConfig(apply_chat_template=chat), DatasetConfig(**dataset))


def learned(tokenizer: PreTrainedTokenizerBase, tokens: np.ndarray, mask: np.ndarray) -> tuple[str, str]:
    return str(tokenizer.decode(tokens)), str(tokenizer.decode(tokens[mask]))


@pytest.mark.parametrize("around", ["$A", "$A </s>", "<s> $A", "<s> $A </s>"])
def test_no_end_comes_before_the_answer(around: str):
    tokenizer = made(around)
    begin = "<s>" if "<s>" in around else ""
    reads = encoder(tokenizer)
    assert tokenizer.decode(reads.prompt({"input": "2+2="})) == f"{begin}2+2="
    record = {"input": "2+2=", "output": "4", "chosen": "4", "rejected": "5", "text": "2+2=4"}
    assert learned(tokenizer, *reads.conversation(record)) == (f"{begin}2+2=4</s>", "4</s>")
    chosen, rejected = encode_pair(reads, 0, record)
    assert learned(tokenizer, chosen.tokens, chosen.loss_mask) == (f"{begin}2+2=4</s>", "4</s>")
    assert learned(tokenizer, rejected.tokens, rejected.loss_mask) == (f"{begin}2+2=5</s>", "5</s>")


def test_a_tokenizer_without_an_end_learns_texts_without_one(caplog):
    tokenizer = made(eos=None)
    with caplog.at_level(logging.WARNING):
        assert learned(tokenizer, *encoder(tokenizer).conversation({"input": "2+2=", "output": "4"})) == ("2+2=4", "4")
    assert "no end-of-sequence token" in caplog.text


def test_a_token_without_context_is_not_counted():
    tokenizer = made()
    tokens, mask = encoder(tokenizer).conversation({"input": "", "output": "abcd"})
    assert learned(tokenizer, tokens, mask) == ("abcd</s>", "bcd</s>")
    chosen, _ = encode_pair(encoder(tokenizer), 0, {"input": "", "chosen": "ab", "rejected": "ac"})
    assert chosen.loss_mask.tolist() == [False, True, True]
    with pytest.raises(ValueError, match="no token remains to learn"):
        encoder(tokenizer).conversation({"input": "", "output": ""})
    with pytest.raises(ValueError, match="the prompt is empty"):
        encoder(tokenizer).prompt({"input": ""})
    assert encoder(made("<s> $A")).prompt({"input": ""}).tolist() == [0]


@pytest.mark.parametrize("trim", [True, False])
def test_a_token_across_the_border_is_learned(trim: bool):
    tokenizer = made(trim=trim)
    tokenizer.chat_template = CHATML
    reads = encoder(tokenizer, chat=True)
    record = {"input": "a", "output": "\nb", "chosen": "\nb", "rejected": "c"}
    tokens, mask = reads.conversation(record)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\nb"}]
    assert tokens.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
    assert learned(tokenizer, tokens, mask)[1].startswith("\n\nb<|im_end|>")
    chosen, rejected = encode_pair(reads, 0, record)
    assert learned(tokenizer, chosen.tokens, chosen.loss_mask)[1].startswith("\n\nb<|im_end|>")
    assert learned(tokenizer, rejected.tokens, rejected.loss_mask)[1].startswith("c<|im_end|>")
    plain = encoder(tokenizer)
    assert learned(tokenizer, *plain.conversation({"input": "a:", "output": " b"})) == ("a: b</s>", " b</s>")
    assert learned(tokenizer, *plain.conversation({"input": "a: ", "output": "b"})) == ("a: b</s>", " b</s>")


@pytest.mark.parametrize("name", ["byte level, trimmed", "byte level", "the tiny recipes'"])
def test_spans_cover_their_text_alone(name: str):
    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "tiny") if name.startswith("the") else made(trim="trimmed" in name)
    text = "a b  c\n\n d\n\ne é 日本 f"
    pieces = [" b", "b", " c", "\n\n", " d\n", "é", "日本", " "]
    for span in [(at, at + len(piece)) for piece in pieces for at in [text.find(piece)]]:
        tokens, mask = tokens_with_text(tokenizer, text, [span])
        inside = str(tokenizer.decode(np.asarray(tokens)[mask]))
        assert text[slice(*span)].strip() in inside or name.startswith("the")
        before = len(tokenizer(text[: span[0]], add_special_tokens=False).input_ids)
        if tokens[:before] == tokenizer(text[: span[0]], add_special_tokens=False).input_ids:
            assert np.flatnonzero(mask)[0] == before  # no token spans the border
        slow_tokens, slow = _by_prefixes(tokenizer, text, [span])
        assert slow_tokens == tokens
        assert slow.tolist() == mask.tolist()


def test_the_special_tokens_before_a_text_are_the_post_processors():
    assert PlainText(made("<s> $A </s>")).begin == [0]
    assert PlainText(made("$A </s>")).begin == []
    assert PlainText(AutoTokenizer.from_pretrained(RECIPES / "tiny")).begin == [1]
