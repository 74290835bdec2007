"""The benchmarks' cases: two models, their batches, and the length of every completion.

A step trains on `prompts * generations` samples of one generation, in float32, with AdamW at lr 1e-4. Weights are random: what
a step costs depends on shapes and lengths, not on what the model says. Lengths are dealt out beforehand, so that everyone
samples and trains on exactly as many tokens: completion i of a step has `case.lengths()[i]` tokens, 32 each in `0.8M`, and else
geometric: with mean 65, cut at 256, in `32M`, with mean 132, cut at 515, in `0.8M-skewed`. Ours get them as the limit of each
request, TRL by a logits processor that lets a row end there and nowhere else.

Imported in TRL's environment too, so nothing of the pipeline is used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

PAD, EOS = 0, 1  # TRL needs both; ours knows no end of sequence, since its requests say where to end
LEARNING_RATE = 1e-4
_LENGTHS_SEED = 2819  # 48 geometric draws with mean 65.3 and largest 209, close to what they should have


@dataclass(frozen=True)
class Case:
    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    prompts: int  # per step
    generations: int  # per prompt
    prompt_length: int  # of every prompt, so that nobody pads those
    mean_length: int  # of completions
    max_length: int
    warmup: int  # steps
    steps: int
    packed_tokens: int  # ours: of one microbatch, the best of several sizes
    trl_micro_batch: int  # TRL: samples of one microbatch, the best of several sizes

    @property
    def samples(self) -> int:
        return self.prompts * self.generations

    def lengths(self) -> np.ndarray:
        """Return completion lengths of every step, prompt by prompt, [prompts * generations] int64."""
        if self.mean_length == self.max_length:
            return np.full(self.samples, self.max_length)
        return np.random.default_rng(_LENGTHS_SEED).geometric(1 / self.mean_length, self.samples).clip(2, self.max_length)

    def prompts_of(self, step: int) -> np.ndarray:
        """Return prompts, [prompts, prompt_length] int64."""
        return np.random.default_rng(step).integers(2, self.vocab_size, (self.prompts, self.prompt_length))

    @property
    def tokens(self) -> tuple[int, int]:
        """Return (prompt tokens, completion tokens) of all samples of a step."""
        return self.samples * self.prompt_length, int(self.lengths().sum())

    @property
    def multiplied(self) -> int:
        """Return the number of parameters that every token is multiplied with: all but the input embedding and the norms."""
        layer = 4 * self.hidden_size**2 + 3 * self.hidden_size * self.intermediate_size
        return self.layers * layer + self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        return self.multiplied + self.vocab_size * self.hidden_size + (2 * self.layers + 1) * self.hidden_size


SMALL = Case("0.8M", 48, 128, 344, 4, 4, 16, 8, 12, 32, 32, 2, 5, packed_tokens=1536, trl_micro_batch=32)
SKEWED = Case("32M", 4096, 512, 1600, 8, 8, 6, 8, 44, 65, 256, 1, 3, packed_tokens=1024, trl_micro_batch=8)
SMALL_SKEWED = Case("0.8M-skewed", 48, 128, 344, 4, 4, 4, 8, 12, 132, 515, 2, 5, packed_tokens=1536, trl_micro_batch=8)
HALF = replace(SKEWED, name="32M-half", prompts=3)  # four contenders would take too long for all steps
CASES = {case.name: case for case in (SMALL, SKEWED, SMALL_SKEWED, HALF)}
STEP_CASES = (SMALL, SKEWED)  # of the comparison with TRL
TRAIN_CASES = (SMALL_SKEWED, HALF)  # of the comparison of train backends: in SMALL there is nothing to pad


def padded_microbatches(lengths: Sequence[int], most_tokens: int) -> list[list[int]]:
    """Form microbatches like a trainer without packing: samples in order, each padded to the longest of its microbatch.

    Fewer to a microbatch are padded less, and on a CPU are cheaper for that; on a GPU they leave it idle.
    """
    microbatches: list[list[int]] = [[]]
    for i in range(len(lengths)):
        together = [*microbatches[-1], i]
        if len(together) > 1 and padded_tokens(lengths, [together]) > most_tokens:
            microbatches.append([i])
        else:
            microbatches[-1] = together
    return microbatches


def padded_tokens(lengths: Sequence[int], microbatches: list[list[int]]) -> int:
    return sum(len(members) * max(lengths[i] for i in members) for members in microbatches)


def score(text: str) -> float:
    """Return the reward: the share of words with an even number, so that samples of a group differ."""
    words = text.split()
    return sum(word[-1] in "02468" for word in words) / max(1, len(words))


def write(case: Case, folder: Path) -> None:
    """Write the checkpoint that all start from, with TRL's tokenizer; ours, without an end of sequence, is in `tokenizer/`."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=case.vocab_size,
        hidden_size=case.hidden_size,
        intermediate_size=case.intermediate_size,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.heads,
        max_position_embeddings=case.prompt_length + case.max_length,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    # No word contains another's special token, which the tokenizer would match.
    vocabulary = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, case.vocab_size)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
