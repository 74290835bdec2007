"""The problems that checks find in a recipe, a file or a cluster, and the error that carries them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pipeline.problem_codes import CODES

HELP_HINT = "for cause and cure: python launch/submit.py help=CODE"
"""The line below a list of problems."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and where.

    key: dotted key of the recipe, or the command line's word, that has to change
    code: stable name of the kind of problem, one of `pipeline.problem_codes.CODES`; tests and scripts compare this
    message: what was found, what is expected, what to try: `got 0; expected at least 1`. Its words may change
    origin: where the recipe gives the key, such as `recipes/tiny_grpo.yaml:12`; empty where it does not
    """

    key: str
    code: str
    message: str
    origin: str = ""

    def __post_init__(self) -> None:
        assert self.code in CODES, f"{self.code}: add it to pipeline/problem_codes.py"

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, self.key, self.message) if part)

    def within(self, where: str) -> Problem:
        """Return the problem with `where` before its origin: the run, or the needed recipe, that has it."""
        return replace(self, origin=": ".join(part for part in (where, self.origin) if part))


class RecipeError(ValueError):
    """A recipe, a file or a cluster that cannot be used, with all `problems` that were found."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("\n".join(map(str, self.problems)))


def refuse(problems: Iterable[Problem]) -> None:
    """Raise RecipeError if there are problems; each is named once."""
    if found := tuple(dict.fromkeys(problems)):
        raise RecipeError(*found)


def listed(problems: Sequence[Problem]) -> str:
    """Return the problems as a command prints them, each with `[code]` at its end: one on its own line, several as a list."""
    lines = [f"{problem} [{problem.code}]" for problem in problems]
    if len(lines) == 1:
        return lines[0]
    return "\n  - ".join([f"{len(lines)} problems", *lines]) + f"\n{HELP_HINT}"


@contextmanager
def collected(problems: list[Problem]) -> Iterator[None]:
    """Add the problems of a RecipeError in this block to `problems`, and leave the rest of the block out."""
    try:
        yield
    except RecipeError as error:
        problems += error.problems
