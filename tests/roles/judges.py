"""Tiny reward models on disk, their scores by transformers, and a recipe that uses one."""

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedTokenizerFast

from pipeline import config
from pipeline.config import Recipe
from tests.launch.model import write_recipe

LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789+="
PAD, END = 0, 1  # tokens; the letters follow
CHATML = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}!\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
LIMIT = 32


def write_tokenizer(folder: Path, letters: str = LETTERS, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """Write a tokenizer with one token for each letter; "!" ends a sequence."""
    known = {letter: i for i, letter in enumerate(["_", "!", *letters, "<", ">", "\n"])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="_", eos_token="!", unk_token="_")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_judge(folder: Path, letters: str = LETTERS, chat_template: str | None = None) -> Path:
    """Write a llama with one label; every tensor is random."""
    torch.manual_seed(5)
    described = LlamaConfig(
        vocab_size=len(letters) + 5,
        hidden_size=32,
        intermediate_size=44,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=PAD,
    )
    model = AutoModelForSequenceClassification.from_config(described, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder, letters, chat_template)
    return folder


def eager_scores(folder: Path, sequences: list[list[int]]) -> list[float]:
    """Return scores by transformers, padded on the right, in float64. No sequence may contain PAD."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    longest = max(map(len, sequences))
    tokens = torch.tensor([[*sequence, *[PAD] * (longest - len(sequence))] for sequence in sequences])
    with torch.no_grad():
        return model(input_ids=tokens, attention_mask=(tokens != PAD).long()).logits[:, 0].tolist()


def recipe(folder: Path, *overrides: str, **env) -> Recipe:
    """Return a GRPO recipe with the reward model in `folder`/judge in float32.

    The policy's tokenizer is in `folder`/model.
    """
    judge = {"kind": "reward_model", "model_name": str(folder / "judge"), "precision": "float32", **env}
    path = write_recipe(folder, env={"judge": judge, "math": {"kind": "math"}})
    packing = [f"policy.sequence_packing.logprob_mb_tokens={LIMIT + 8}", "policy.dtensor_cfg.enabled=true"]
    return config.load(str(path), [*packing, f"policy.max_total_sequence_length={LIMIT}", *overrides])
