"""The interface of tasks. To add a kind of task, add a file to this package and a line to pipeline/algorithms/evaluate.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from pipeline.algorithms.evaluate import TaskConfig
from pipeline.config import Recipe
from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.engines import Engines
from pipeline.evaluation.questions import Answer, PerQuestion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Task(Protocol):
    """A task of the suite, on rank 0."""

    name: str
    config: TaskConfig
    # `scales`, a mapping of metrics to `statistics.Scale`, may say what values these can have; see `scores.scales_of`.
    # `dropped`, an int, may say how many records data.bad_records=drop has left out.
    warnings: Sequence[str]  # about its data, for the log and scores.json

    def __init__(self, name: str, config: TaskConfig, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> None:
        """Read the data. Raises RecipeError if it is missing, or if a record does not have the format."""

    def ask(self, engines: Engines, answers: AnswerLog) -> None:
        """Ask the questions whose answers are missing in `answers`, and add each new answer as it arrives."""

    def metrics(self, answers: Sequence[Answer]) -> dict[str, PerQuestion]:
        """Return metric -> question id -> values, computed from `answers` alone. The task's main metric comes first."""
        ...
