"""Generate arithmetic word problems in plain English for small chat models, with short worked answers.

    Mia has 9 pencils and gets 4 more. How many pencils does Mia have now?   ->   9 + 4 = 13

Each problem has one step: a sum, a difference or a product. The answer is a whole number.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

from pipeline.recipe.problems import Problem, RecipeError

VALIDATION_SHARE = 16  # one problem in 16 is for validation
NAMES = ("Ana", "Ben", "Leo", "Mia", "Sam", "Zoe")
THINGS = ("apples", "books", "cards", "coins", "pencils", "shells")


def problems(split: str, size: int, seed: int, largest: int = 20) -> list[dict[str, str]]:
    """Return `size` problems as `{"input": question, "output": "9 + 4 = 13", "answer": "13"}`, drawn with replacement.

    largest: the largest number in sums and differences; factors are at most half of it. The question alone decides whether a
    problem belongs to "train" or "validation", so the two splits are disjoint. Raise RecipeError for another split, and for
    `largest` below 4.
    """
    return [
        {"input": question, "output": output, "answer": str(answer)}
        for question, output, answer in _draw("word_problems", split, size, seed, largest)
    ]


def preferences(split: str, size: int, seed: int, largest: int = 20) -> list[dict[str, str]]:
    """Return `size` problems as `{"input", "chosen", "rejected"}`: the right answer, and the same with a wrong result.

    Arguments and errors are those of `problems`.
    """
    records, draw = [], random.Random(f"wrong results {split} {seed}")
    for question, output, answer in _draw("word_problem_preferences", split, size, seed, largest):
        wrong = answer + draw.choice([-2, -1, 1, 2, 10] if answer > 1 else [1, 2, 10])
        records.append({"input": question, "chosen": output, "rejected": f"{output.rpartition(' ')[0]} {wrong}"})
    return records


def _draw(name: str, split: str, size: int, seed: int, largest: int) -> Iterator[tuple[str, str, int]]:
    """Yield (question, worked answer, result)."""
    if split not in ("train", "validation"):
        raise RecipeError(Problem("data", "not-a-choice", f"{name}: got split '{split}'; expected train or validation"))
    if largest < 4:
        raise RecipeError(Problem("data", "too-small", f"{name}: got largest {largest}; expected at least 4"))
    draw = random.Random(f"word problems {split} {seed}")
    while size > 0:
        question, output, answer = _problem(draw, largest)
        if (split == "validation") == (zlib.crc32(question.encode()) % VALIDATION_SHARE == 0):
            size -= 1
            yield question, output, answer


def _problem(draw: random.Random, largest: int) -> tuple[str, str, int]:
    who, what, kind = draw.choice(NAMES), draw.choice(THINGS), draw.randrange(3)
    a, b = draw.randint(2, largest), draw.randint(2, largest)
    if kind == 0:
        return f"{who} has {a} {what} and gets {b} more. How many {what} does {who} have now?", f"{a} + {b} = {a + b}", a + b
    if kind == 1:
        a, b = max(a, b), min(a, b)
        return f"{who} has {a} {what} and gives {b} away. How many {what} are left?", f"{a} - {b} = {a - b}", a - b
    a, b = draw.randint(2, largest // 2), draw.randint(2, largest // 2)
    return f"{who} has {a} bags with {b} {what} in each. How many {what} are there in all?", f"{a} * {b} = {a * b}", a * b
