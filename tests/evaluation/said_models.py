"""Tiny models for whole evaluations: one that says what the chat template asks for, one with random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SAID = {"<v>": "Verdict: A", "<r>": "Rating: 7", "<f>": "Verdict: refused", "<x>": "No"}
JUDGE = (
    "{{ messages[0]['content'] }}{% if 'Rate the' in messages[0]['content'] %}<r>"
    "{% elif 'Decide whether' in messages[0]['content'] %}<f>{% else %}<v>{% endif %}"
)
POLICY = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
NO = "{{ messages[-1]['content'] }}<x>"
"""Chat templates: of a judge, of a model, and of one that says No."""


def write_tokenizer(folder: Path, chat_template: str, says: dict[str, str] = SAID) -> PreTrainedTokenizerFast:
    """Write a tokenizer of the printable ASCII characters, and of what is said, as one token each."""
    known = {text: i for i, text in enumerate(["<pad>", "<end>", "<unk>", "\n", *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<end>", "<unk>", *says])
    tokenizer.add_tokens([*says.values()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unk>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return fast


def write_model(folder: Path, chat_template: str, said: bool = True, longest: int = 8192, says: dict[str, str] = SAID) -> Path:
    """Write a llama that says the texts of `says` after their tokens, or with `said` false one with random weights."""
    tokenizer = write_tokenizer(folder, chat_template, says)
    torch.manual_seed(3)
    described = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(described).float()
    if said:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.fill_(1.0 if "norm" in name else 0.0)
            for i, (begin, text) in enumerate(says.items()):
                first, second = tokenizer.convert_tokens_to_ids([begin, text])
                model.model.embed_tokens.weight[first, 2 * i] = model.model.embed_tokens.weight[second, 2 * i + 1] = 1.0
                model.lm_head.weight[second, 2 * i] = model.lm_head.weight[tokenizer.eos_token_id, 2 * i + 1] = 10.0
    model.save_pretrained(folder)
    return folder
