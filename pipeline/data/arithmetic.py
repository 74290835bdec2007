"""Products that a small model cannot work out in its head, and careless demonstrations of how to ask a calculator.

    47*85=  ->  [47*85]3995;3995

Between the brackets is what the calculator is asked; what it says comes next, up to the `;`, and then the answer. In an episode
its environment puts the calculator's words there (recipes/tiny_calculator.yaml): what a model has learned to write in their
place is never used.

Leaves out: other operations.
"""

from __future__ import annotations

import random
import zlib

VALIDATION_SHARE = 16  # one product in so many is for validation


def products(split: str, size: int, seed: int, digits: int = 2, asks: float = 1.0) -> list[dict[str, str]]:
    """Return `size` products as `{"input": "47*85=", "output": "[47*85]3995;3995", "answer": "3995"}`, drawn with replacement.

    Each factor has `digits` digits. asks: the share of demonstrations that ask; the others guess (`4127`), evenly among the
    numbers with as many digits as the answer has. Whether a product is of "train" or of "validation" is its own property, so
    the two share none. Raises ValueError for another split, and for digits below 1.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"calculator_multiplication: split '{split}' is not one of: train, validation")
    if digits < 1:
        raise ValueError(f"calculator_multiplication: digits {digits} is too small; at least 1")
    draw, records = random.Random(f"calculator multiplication {split} {seed}"), []
    while len(records) < size:
        a, b = (draw.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        if (split == "validation") != (zlib.crc32(f"{a}*{b}".encode()) % VALIDATION_SHARE == 0):
            continue
        places = len(str(a * b))
        guess = str(draw.randrange(10 ** (places - 1), 10**places))
        output = f"[{a}*{b}]{a * b};{a * b}" if draw.random() < asks else guess
        records.append({"input": f"{a}*{b}=", "output": output, "answer": str(a * b)})
    return records
