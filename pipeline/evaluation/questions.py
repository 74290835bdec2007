"""Questions, formats and answers of an evaluation.

A `Format` turns a record of a data set into a `Question`. A `Task` (`task.py`) asks the questions on the engines, keeps the
answers, and computes its scores from the kept answers alone. So the scores of a restarted evaluation equal those of an
uninterrupted one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

Message = dict[str, Any]
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """One item of a task."""

    id: str  # the record's own, unique in its task; "": `data.read` makes one of its place and content
    prompt: str | list[Message]  # a text, or a conversation that the model continues
    target: str = ""  # the expected answer as a worked example shows it, such as " 42"
    task: dict[str, Any] = field(default_factory=dict)  # what the environment gets, e.g. {"answer": "42"}
    group: str = ""  # subject or category, with a score of its own
    description: str = ""  # text before the worked examples; with a chat template, the end of the system's message
    template_options: dict[str, Any] = field(default_factory=dict)  # of the chat template: tools, and variables of the record
    index: int = 0  # place in the task's whole data, before max_samples; `data.read` sets it


@dataclass(frozen=True)
class NoFormatArguments:
    """The arguments of a format without format_kwargs."""


class Format:
    """Turns the records of one family of data sets into questions."""

    Arguments: ClassVar[type] = NoFormatArguments
    """A dataclass with a field for each key of `format_kwargs`: its type, default and description."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Columns that every record must have."""
    examples: ClassVar[tuple[Record, ...]] = ()
    """Records of the worked examples that the benchmark prescribes. If a task sets few_shot_split, they are not used."""
    examples_by_group: ClassVar[bool] = False
    """True if a question's worked examples have its group."""

    def __init__(self, arguments: Any) -> None:
        """Bind the format to its arguments."""
        self.arguments = arguments

    @property
    def required(self) -> tuple[str, ...]:
        """Columns that every record must have with these arguments, checked before submission."""
        return self.columns

    def indices(self, records: Sequence[Record]) -> Sequence[int]:
        """Return the indices of the records to ask. The default is all; a format may leave out some."""
        return range(len(records))

    @abstractmethod
    def question(self, record: Record, index: int) -> Question:
        """Return the question of a record. index: the record's index in its split.

        Raises ValueError for a record that the format cannot read.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to a question, in the form of a line of `answers/TASK.jsonl`. A task keeps further values in `details`."""

    question: str  # Question.id
    sample: int
    score: float | None  # None: not judged, and asked again by a restart
    metrics: dict[str, float] = field(default_factory=dict)  # `unparsed`: 1 where the parser found no answer
    prompt: str = ""
    text: str = ""
    tokens: int = 0  # drawn
    finish: str = ""  # "stop" or "length"
    failure: str = ""  # why there is no score, or how the answer broke its environment
    group: str = ""
    details: dict[str, Any] = field(default_factory=dict)


PerQuestion = Mapping[str, Sequence[float]]
"""Question id -> values of a metric, one for each sample in the order of the samples."""
