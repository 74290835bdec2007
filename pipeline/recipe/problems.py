"""The problems that checks find in a recipe, a file or a cluster, and the error that carries them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from pipeline.recipe.problem_codes import CODES


@dataclass(frozen=True)
class Problem:
    """A mistake in a recipe, on the command line, in a file or in a cluster, and its location.

    key: dotted key of the recipe, or argument of the command line, that has to change
    code: stable name of the kind of problem, one of `pipeline.recipe.problem_codes.CODES`; tests and scripts compare it
    message: `got 0; expected at least 1. Try ...`; its text may change between versions
    origin: file and line of the key, such as `recipes/tiny_grpo.yaml:12`; empty if the recipe does not set it
    """

    key: str
    code: str
    message: str
    origin: str = ""

    def __post_init__(self) -> None:
        assert self.code in CODES, f"{self.code}: add it to pipeline/recipe/problem_codes.py"

    def __str__(self) -> str:
        return ": ".join(part for part in (self.origin, self.key, self.message) if part)

    def within(self, where: str) -> Problem:
        """Return the problem with `where` before its origin. where: the run, or the needed recipe, in which it is."""
        return replace(self, origin=": ".join(part for part in (where, self.origin) if part))


class HetstepError(Exception):
    """The base of the errors that name problems; `problems` has all that were found."""

    def __init__(self, *problems: Problem) -> None:
        assert problems, "an error names at least one problem"
        self.problems = problems
        super().__init__("\n".join(map(str, self.problems)))

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the problems, in their order."""
        return tuple(problem.code for problem in self.problems)


class RecipeError(HetstepError, ValueError):
    """Raised if a recipe, a file or a cluster cannot be used."""


def refuse(problems: Iterable[Problem]) -> None:
    """Raise RecipeError if there are problems. Equal problems are listed once."""
    if found := tuple(dict.fromkeys(problems)):
        raise RecipeError(*found)


def help_hint(problems: Iterable[Problem]) -> str:
    """Return the line below a list of problems: the command that explains their codes."""
    codes = dict.fromkeys(problem.code for problem in problems)
    return f"for cause and cure: python launch/submit.py help={','.join(codes)}"


def format_problems(problems: Sequence[Problem]) -> str:
    """Return the problems as text for a command, each with `[code]` at its end. Several problems form a list."""
    lines = [f"{problem} [{problem.code}]" for problem in problems]
    if len(lines) == 1:
        return lines[0]
    return "\n  - ".join([f"{len(lines)} problems", *lines]) + f"\n{help_hint(problems)}"


@contextmanager
def collected(problems: list[Problem]) -> Iterator[None]:
    """Catch a RecipeError of this block and add its problems to `problems`; the rest of the block is skipped."""
    try:
        yield
    except RecipeError as error:
        problems += error.problems


def problems_of(check: Callable[[], object]) -> list[Problem]:
    """Return the problems of the RecipeError that `check` raises, and [] if it raises none."""
    problems: list[Problem] = []
    with collected(problems):
        check()
    return problems
