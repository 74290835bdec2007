"""Scratchpad addition: a task that a 0.8M-parameter model learns in a minute on two CPU cores, and its tokenizer.

    47+85=  ->  7+5=12,4+8+1=13;132

Columns are added from the right, each with its carry; the answer follows the `;`. Demonstrations can contain mistakes
(`mistakes`): supervised training then learns the scratchpad with its mistakes, and reinforcement learning, which only sees
whether the answer is right, must improve on the demonstrations. `preferences` are pairs of a right demonstration and one with
mistakes. (Scratchpads: Nye et al. 2021, arXiv:2112.00114.)

Not supported: negative numbers, more than two summands.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.recipe.problems import Problem, RecipeError

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
CHARACTERS = "0123456789+=,;:.-*/ abcdefghijklmnopqrstuvwxyz?!()[]<>_'\"#|\n"
Digits = int | Sequence[int]

VALIDATION_SHARE = 16  # one sum in 16 is for validation


def addition(
    split: str,
    size: int,
    seed: int,
    digits: Digits = (1, 2, 3),
    mistakes: float = 0.0,
    long_share: float = 0.0,
    long_digits: Digits = (),
) -> list[dict[str, str]]:
    """Return `size` sums as `{"input": "47+85=", "output": "7+5=12,4+8+1=13;132", "answer": "132"}`, drawn with replacement.

    The number of digits of each summand is uniform in `digits`, and for the share `long_share` of all sums in `long_digits`, so
    that a few answers are several times as long as the others. With probability `mistakes` a column of `output` has a wrong
    last digit, which its result inherits; `answer` is always right. The summands alone decide whether a sum belongs to "train"
    or "validation", so the two splits are disjoint for all sizes and seeds. Raise RecipeError for another split, for digits
    below 1, and for an invalid share.
    """
    draw, records = random.Random(f"scratchpad addition {split} {seed}"), []
    for a, b in _sums(split, size, digits, draw, long_share, long_digits):
        demonstration, _ = _demonstration(a, b, mistakes, draw)
        records.append({"input": f"{a}+{b}=", "output": demonstration, "answer": str(a + b)})
    return records


def preferences(
    split: str, size: int, seed: int, digits: Digits = (1, 2, 3), mistakes: float = 0.0
) -> list[dict[str, str | int]]:
    """Return `size` pairs as `{"input": "47+85=", "chosen": ..., "rejected": ..., "margin": 1}`, drawn with replacement.

    `chosen` is a right demonstration, such as "7+5=12,4+8+1=13;132". `rejected`, such as "7+5=14,4+8+1=13;134", has a wrong
    last digit in at least one column, uniformly drawn, and in each other column with probability `mistakes`. `margin` is the
    number of wrong columns. Sums, splits and errors are those of `addition`.
    """
    draw, records = random.Random(f"scratchpad preferences {split} {seed}"), []
    for a, b in _sums(split, size, digits, draw):
        right, _ = _demonstration(a, b, 0.0, draw)
        wrong, columns = _demonstration(a, b, mistakes, draw, wrong_column=draw.randrange(max(len(str(a)), len(str(b)))))
        records.append({"input": f"{a}+{b}=", "chosen": right, "rejected": wrong, "margin": columns})
    return records


def _sums(
    split: str, size: int, digits: Digits, draw: random.Random, long_share: float = 0.0, long_digits: Digits = ()
) -> Iterator[tuple[int, int]]:
    if split not in ("train", "validation"):
        raise RecipeError(Problem("data", "not-a-choice", f"scratchpad: got split '{split}'; expected train or validation"))
    if not 0 <= long_share < 1:
        message = f"scratchpad: got long_share {long_share}; expected at least 0 and below 1"
        raise RecipeError(Problem("data", "too-small" if long_share < 0 else "too-large", message))
    usual, few = _digits("digits", digits), _digits("long_digits", long_digits) if long_share else []
    count = 0
    while count < size:
        lengths = few if long_share and draw.random() < long_share else usual
        a, b = (_number(draw, draw.choice(lengths)) for _ in range(2))
        if (split == "validation") == _for_validation(a, b):
            count += 1
            yield a, b


def _digits(name: str, value: Digits) -> list[int]:
    digits = [value] if isinstance(value, int) else list(value)
    if not digits or min(digits) < 1:
        raise RecipeError(Problem("data", "too-small", f"scratchpad: got {name} {value}; expected numbers of at least 1"))
    return digits


def _number(draw: random.Random, digits: int) -> int:
    return draw.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _for_validation(a: int, b: int) -> bool:
    return zlib.crc32(f"{a}+{b}".encode()) % VALIDATION_SHARE == 0


def _demonstration(a: int, b: int, mistakes: float, draw: random.Random, wrong_column: int | None = None) -> tuple[str, int]:
    """Return (text, number of its wrong columns).

    `wrong_column` is wrong, and each other column with probability `mistakes`.
    """
    columns, carry, result, wrong = [], 0, "", 0
    for column in range(max(len(str(a)), len(str(b)))):
        x, y = a // 10**column % 10, b // 10**column % 10
        total = x + y + carry
        if column == wrong_column or draw.random() < mistakes:
            total = total // 10 * 10 + (total + draw.randint(1, 9)) % 10
            wrong += 1
        columns.append(f"{x}+{y}+1={total}" if carry else f"{x}+{y}={total}")
        carry, result = total // 10, f"{total % 10}{result}"
    return f"{','.join(columns)};{carry or ''}{result}", wrong


def write_tokenizer(folder: Path) -> None:
    """Write the character tokenizer of `recipes/tiny`: 64 tokens, texts start with <s>.

    python -c "from pathlib import Path; from pipeline.data.scratchpad import write_tokenizer;
    write_tokenizer(Path('recipes/tiny'))"
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors  # for this tool alone
    from transformers import PreTrainedTokenizerFast  # submission may lack it

    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, UNK, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
