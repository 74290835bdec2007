"""Read a task's data: its questions, and the worked examples of each question.

Nothing here imports torch, and `datasets` is imported only to read a data set with it. So the checks before submission can use
this file.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pipeline.algorithms.evaluate import FORMATS, TaskConfig, TaskDataConfig
from pipeline.config import DatasetConfig
from pipeline.config.schema_validation import validate_mapping
from pipeline.data.datasets import load_records, record_location
from pipeline.data.records import value_of
from pipeline.evaluation.dropped_answers import DroppedQuestions
from pipeline.evaluation.questions import Format, Question, Record
from pipeline.recipe import user_code
from pipeline.recipe.problems import Problem, RecipeError

ID_DIGITS = 8  # of the hash of a record's content


@dataclass(frozen=True)
class TaskData:
    """The questions of a task that max_samples selects, in the order of its data, with their worked examples."""

    questions: tuple[Question, ...]
    examples: Mapping[str, tuple[Question, ...]]
    """Question id -> the worked examples that precede the question; empty without num_few_shot."""
    dropped: DroppedQuestions = field(default_factory=DroppedQuestions)
    """Counts the records that are left out, here and where questions are rendered."""


def read(name: str, task: TaskConfig) -> TaskData:
    """Return the questions of the task `name`, with their worked examples.

    Random draws depend only on the task's seed and the records. Raises RecipeError if data are missing or a record does not
    have the format. With data.bad_records=drop such records are left out before anything is drawn.
    """
    key = f"evaluate.tasks.{name}"
    form = load_format(key, task)
    dropped = DroppedQuestions(task.data.bad_records == "drop")
    records = _usable(key, form, _records(f"{key}.data", task, task.data.split), dropped)
    with _with_key(f"{key}.data"):
        indices = form.indices(records)
    chosen = [indices[number] for number in _select(len(indices), task)]
    questions = _with_ids([_question(key, form, records, index) for index in chosen], records)
    return TaskData(questions, _examples(key, task, form, records, questions), dropped)


def load_format(key: str, task: TaskConfig) -> Format:
    """Return the format of a task. Raises RecipeError if it does not exist, or if format_kwargs do not fit."""
    path = FORMATS.get(task.format, task.format)
    try:
        kind: type[Format] = user_code.load(path)
    except user_code.NotFound as error:
        raise RecipeError(Problem(f"{key}.format", "not-importable", f"'{path}': {error}")) from error
    if not (isinstance(kind, type) and issubclass(kind, Format)):
        message = f"got {path}; expected a class that derives from pipeline.evaluation.questions.Format"
        raise RecipeError(Problem(f"{key}.format", "wrong-type", message))
    arguments, problems = validate_mapping(kind.Arguments, f"{key}.format_kwargs", task.format_kwargs)
    if problems:
        raise RecipeError(*problems)
    return kind(arguments)


def subsets(data: TaskDataConfig) -> tuple[str | None, ...]:
    """Return the names of the data set's configurations whose records are joined; (None,) for the default configuration."""
    return tuple(part.strip() for part in data.subset.split(",")) if data.subset else (None,)


def data_files(key: str, data: TaskDataConfig, split: str) -> list[Path]:
    """Return the JSONL files of a split, for a task with data_path. Raises RecipeError for a file that does not exist."""
    assert data.data_path is not None
    path = Path(data.data_path)
    if path.is_dir():
        files = [path / (subset or "") / f"{split}.jsonl" for subset in subsets(data)]
    elif split != data.split:
        message = f"got the file {path}, which has the split {data.split}; expected a folder with {data.split}.jsonl and"
        hint = f"{split}.jsonl, since few_shot_split is {split}"
        raise RecipeError(Problem(f"{key}.data_path", "contradiction", f"{message} {hint}"))
    else:
        files = [path]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise RecipeError(*(Problem(f"{key}.data_path", "file-not-found", f"there is no file {file}") for file in missing))
    return files


def to_question(form: Format, record: Record, index: int) -> Question:
    """Return the question of a record. index: the record's index. Raises ValueError if the record does not have the format."""
    for column in form.required:
        value_of(record, column)
    try:
        return form.question(record, index)
    except (AttributeError, LookupError, TypeError) as error:  # such as a number in place of a text
        raise ValueError(f"the record does not fit the format: {type(error).__name__}: {error}") from error


# ---- records ---------------------------------------------------------------------------------------------------------------


def _records(key: str, task: TaskConfig, split: str) -> Sequence[Record]:
    data = task.data
    if data.data_path is not None and data.dataset_name is not None:
        raise RecipeError(Problem(key, "contradiction", "got both dataset_name and data_path; expected one of them"))
    if data.data_path is not None:
        sources = [DatasetConfig(data_path=str(file)) for file in data_files(key, data, split)]
    else:
        sources = [
            DatasetConfig(dataset_name=data.dataset_name, subset=subset, split=split, kwargs=data.kwargs)
            for subset in subsets(data)
        ]
    with _with_key(key):
        parts = [load_records(source, task.seed, data.bad_records == "drop") for source in sources]
    return parts[0] if len(parts) == 1 else [record for part in parts for record in part]


def _usable(key: str, form: Format, records: Sequence[Record], dropped: DroppedQuestions) -> Sequence[Record]:
    """Return the records that have the format, if the task drops bad ones.

    Otherwise return all records; the use of a bad record then raises RecipeError.
    """
    if not dropped.drops:
        return records
    usable = []
    for index in range(len(records)):
        with dropped.dropping():
            _question(key, form, records, index)
            usable.append(records[index])
    dropped.check(len(usable))
    return usable


@contextlib.contextmanager
def _with_key(key: str) -> Iterator[None]:
    """Turn errors of the block, which reads data, into RecipeErrors at the recipe's `key`."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(*(replace(problem, key=key) for problem in error.problems)) from error
    except OSError as error:
        raise RecipeError(Problem(key, "unreadable", str(error))) from error
    except ValueError as error:
        raise RecipeError(Problem(key, "bad-record", str(error))) from error


def _select(count: int, task: TaskConfig) -> list[int]:
    """Return the indices of max_samples random records, in order. A larger max_samples keeps the records of a smaller one."""
    most = task.data.max_samples
    if most is None or most >= count:
        return list(range(count))
    return sorted(np.random.default_rng(task.seed).permutation(count)[:most].tolist())


def _question(key: str, form: Format, records: Sequence[Record], index: int) -> Question:
    try:
        return replace(to_question(form, records[index], index), index=index)
    except ValueError as error:
        raise RecipeError(Problem(f"{key}.data", "bad-record", f"{record_location(records, index)}: {error}")) from error


def _with_ids(questions: list[Question], records: Sequence[Record]) -> tuple[Question, ...]:
    """Return the questions, with a new id for each question that has none or shares its id with others."""
    counts = Counter(question.id for question in questions)
    return tuple(
        question if question.id and counts[question.id] == 1 else replace(question, id=_made_id(question, records))
        for question in questions
    )


def _made_id(question: Question, records: Sequence[Record]) -> str:
    content = json.dumps(records[question.index], sort_keys=True, default=str)
    return f"{question.index}-{hashlib.sha256(content.encode()).hexdigest()[:ID_DIGITS]}"


# ---- worked examples -------------------------------------------------------------------------------------------------------


def _examples(
    key: str, task: TaskConfig, form: Format, records: Sequence[Record], questions: Sequence[Question]
) -> dict[str, tuple[Question, ...]]:
    if not task.num_few_shot:
        return {}
    split = task.data.few_shot_split
    if split is None and form.examples:
        pool: Sequence[Record] = form.examples
    else:
        pool = records if split in (None, task.data.split) else _pool(key, task, form, split)
    examples = _Examples(key, task, form, pool, None if pool is not records else records)
    return examples.of(questions, len(records))


def _pool(key: str, task: TaskConfig, form: Format, split: str | None) -> Sequence[Record]:
    """Return the records of `split`, another one than the questions'.

    If the task drops bad records, they are left out here without being counted, since they are not questions.
    """
    assert split is not None
    records = _records(f"{key}.data", task, split)
    return _usable(key, form, records, DroppedQuestions(task.data.bad_records == "drop"))


class _Examples:
    """Chooses worked examples from a pool of records. data: the pool if it has the questions' own records, else None."""

    def __init__(self, key: str, task: TaskConfig, form: Format, pool: Sequence[Record], data: Sequence[Record] | None) -> None:
        self._key, self._form, self._pool, self._question_records = key, form, pool, data
        self._count, self._seed = task.num_few_shot, task.seed
        self._first = task.few_shot_choice == "first" or pool is form.examples
        self._made: dict[int, Question] = {}

    def of(self, questions: Sequence[Question], records: int) -> dict[str, tuple[Question, ...]]:
        """Return question id -> its worked examples. records: the number of records in the task's whole data."""
        if self._form.examples_by_group:
            return {question.id: self._of_group(question) for question in questions}
        everything = range(len(self._pool))
        if self._first:
            return {question.id: self._take(everything, question) for question in questions}
        # One generator for all records in order, also those that max_samples leaves out: the draws of lm-evaluation-harness.
        generator, by_index = random.Random(self._seed), {question.index: question for question in questions}
        chosen = {}
        for index in range(records):
            indices = self._draw(generator, everything, self._own_record(index))
            if index in by_index:
                chosen[by_index[index].id] = tuple(map(self._example, indices))
        return chosen

    def _of_group(self, question: Question) -> tuple[Question, ...]:
        indices = [index for index in range(len(self._pool)) if self._example(index).group == question.group]
        if self._first:
            return self._take(indices, question)
        generator = random.Random(f"{self._seed} {question.index}")
        return tuple(map(self._example, self._draw(generator, indices, self._own_record(question.index))))

    def _take(self, indices: Sequence[int], question: Question) -> tuple[Question, ...]:
        record = self._own_record(question.index)
        candidates = (index for index in indices if record is None or self._pool[index] != record)
        return tuple(map(self._example, self._enough(list(itertools.islice(candidates, self._count)))))

    def _own_record(self, index: int) -> Record | None:
        return self._question_records[index] if self._question_records is not None else None

    def _draw(self, generator: random.Random, indices: Sequence[int], record: Record | None) -> list[int]:
        """Draw the indices of worked examples from `indices`. Records equal to `record` are left out."""
        if record is None:
            count = self._count + self._form.draws_one_more
            return self._enough(generator.sample(indices, min(count, len(indices))))
        sample = generator.sample(indices, min(self._count + 1, len(indices)))
        examples = [index for index in sample if self._pool[index] != record][: self._count]
        if len(examples) < self._count:
            candidates = [index for index in indices if self._pool[index] != record]
            examples = generator.sample(candidates, min(self._count, len(candidates)))
        return self._enough(examples)

    def _enough(self, indices: Sequence[int]) -> list[int]:
        if len(indices) < self._count:
            message = f"got {self._count}, but there are only {len(indices)} records to choose worked examples from"
            raise RecipeError(Problem(f"{self._key}.num_few_shot", "too-large", message))
        return list(indices[: self._count])

    def _example(self, index: int) -> Question:
        if index not in self._made:
            self._made[index] = _question(self._key, self._form, self._pool, index)
        return self._made[index]
