"""The error that every check of a recipe raises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class RecipeError(ValueError):
    """Something in the recipe is wrong; each of `problems` says what, where, and what would be right.

    Checks are generators of such problems, so that all of them are told at once; `refuse` makes an error of what they yield.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def refuse(problems: Iterable[str]) -> None:
    """Raises RecipeError if there are problems; each is told once."""
    if found := tuple(dict.fromkeys(problems)):
        raise RecipeError(*found)


@contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """What is refused inside is added to `problems` instead; the rest of the block is left out then."""
    try:
        yield
    except RecipeError as error:
        problems += error.problems
