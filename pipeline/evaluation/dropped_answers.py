"""Count the questions that a task leaves out because they cannot be asked, if its `data.bad_records` is `drop`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.recipe.problems import Problem, RecipeError

logger = logging.getLogger(__name__)

SHOWN = 20  # dropped questions that the log names


@dataclass
class DroppedQuestions:
    """Counts the questions that a task drops."""

    drops: bool = False  # whether the task drops bad questions
    count: int = 0
    first: RecipeError | None = None

    @contextlib.contextmanager
    def dropping(self) -> Iterator[None]:
        """Drop the question that the block reads or renders, if the block raises a RecipeError of only bad-record problems."""
        try:
            yield
        except RecipeError as error:
            if not self.drops or any(problem.code != "bad-record" for problem in error.problems):
                raise
            self.count += 1
            self.first = self.first or error
            if self.count <= SHOWN:
                logger.warning("bad_records=drop: questions dropped so far: %d, the last one: %s", self.count, error)

    def check(self, remaining: int) -> None:
        """Raise RecipeError if questions were dropped and none remains. remaining: the number of questions left."""
        if self.first is not None and not remaining:
            (problem, *_) = self.first.problems
            message = f"none of {self.count} records can be asked. The first problem: {problem.message}"
            raise RecipeError(Problem(problem.key, "bad-record", message)) from self.first

    @property
    def warnings(self) -> list[str]:
        """The warning for scores.json, as a list of one text; empty if no question was dropped."""
        if self.first is None:
            return []
        records = "record" if self.count == 1 else "records"
        return [f"dropped {self.count} bad {records} (data.bad_records=drop); no score counts them. The first: {self.first}"]
