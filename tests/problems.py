"""Assertions on the key and the code of problems, so that tests do not depend on their wording."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from pipeline.config import Problem, RecipeError


def named(problems: Iterable[Problem]) -> set[tuple[str, str]]:
    """Return (key, code) of each problem."""
    return {(problem.key, problem.code) for problem in problems}


@contextmanager
def refused(*expected: tuple[str, str]) -> Iterator[pytest.ExceptionInfo[RecipeError]]:
    """Assert that the block raises RecipeError with exactly these (key, code)."""
    with pytest.raises(RecipeError) as error:
        yield error
    assert named(error.value.problems) == set(expected), str(error.value)
