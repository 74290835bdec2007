"""Generate products that a small model cannot compute, with demonstrations of a calculator.

    47*85=  ->  [47*85]3995;3995

The brackets contain the expression for the calculator. Its result follows, up to the `;`, and then the answer. In an episode
the environment inserts the calculator's result (recipes/tiny_calculator.yaml) and discards what the model writes in its place.

Not supported: other operations.
"""

from __future__ import annotations

import random
import zlib

from pipeline.recipe.problems import Problem, RecipeError

VALIDATION_SHARE = 16  # one product in 16 is for validation


def products(split: str, size: int, seed: int, digits: int = 2, asks: float = 1.0) -> list[dict[str, str]]:
    """Return `size` products as `{"input": "47*85=", "output": "[47*85]3995;3995", "answer": "3995"}`, drawn with replacement.

    Each factor has `digits` digits. asks: the share of demonstrations that use the calculator; the others guess (`4127`),
    uniformly among the numbers with as many digits as the answer. The factors alone decide whether a product belongs to "train"
    or "validation", so the two splits are disjoint. Raise RecipeError for another split, and for digits below 1.
    """
    if split not in ("train", "validation"):
        message = f"calculator_multiplication: got split '{split}'; expected train or validation"
        raise RecipeError(Problem("data", "not-a-choice", message))
    if digits < 1:
        raise RecipeError(Problem("data", "too-small", f"calculator_multiplication: got digits {digits}; expected at least 1"))
    draw, records = random.Random(f"calculator multiplication {split} {seed}"), []
    while len(records) < size:
        a, b = (draw.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
        if (split == "validation") != (zlib.crc32(f"{a}*{b}".encode()) % VALIDATION_SHARE == 0):
            continue
        width = len(str(a * b))
        guess = str(draw.randrange(10 ** (width - 1), 10**width))
        output = f"[{a}*{b}]{a * b};{a * b}" if draw.random() < asks else guess
        records.append({"input": f"{a}*{b}=", "output": output, "answer": str(a * b)})
    return records
